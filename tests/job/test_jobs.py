"""Real ranks that fail, die, exit and are stopped, under every way to start them
(`rank_script.py` is the rank).
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.processes import (
    RINGRUN,
    ROOT,
    assert_gone,
    mpi_family,
    mpirun_command,
    mpirun_path,
    started,
    written_pids,
)

SCRIPT = str(ROOT / "tests" / "job" / "rank_script.py")

needs_mpirun = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python")
pytestmark = pytest.mark.ranks
# the others are about what launcher and rank see of each other
FORKED = ("raise", "raise-all-caught", "caught-exit", "kill", "wait")
AT_ONCE = 60.0  # seconds, within which a job ends whose ranks would wait for 600


def started_by(launcher, action, folder):
    script = [SCRIPT, action, str(folder)]
    if launcher == "mpirun":
        python = forked.python() if action in FORKED else [sys.executable]
        return mpirun_command(2, *python, *script)
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *script]
    return [*RINGRUN, "-n", "2", *(["--no-mpi"] if launcher == "plain" else []), *script]


@contextlib.contextmanager
def job(launcher, action, folder, **env):
    """The launcher, and the pids of both ranks, once they are up."""
    env |= forked.ranks() if action in FORKED else {}
    with started(started_by(launcher, action, folder), **env) as process:
        pids = written_pids(process, [folder / f"pid.{rank}" for rank in range(2)])
        try:
            yield process, pids
        finally:
            for pid in pids:  # those that ringrun started live in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ended(launcher, action, folder, act=lambda process, pids: None, **env):
    """Pids, exit code and output, after ``act(launcher, pids)``; fails if anything goes on."""
    with job(launcher, action, folder, **env) as (process, pids):
        act(process, pids)
        output, _ = process.communicate(timeout=AT_ONCE)
        assert_gone(pids)
    return pids, process.returncode, output


LAUNCHERS = [pytest.param("mpirun", marks=needs_mpirun), "plain"]


@pytest.mark.parametrize("launcher", ["plain", "torchrun"])
def test_a_rank_that_raises_outside_fit(launcher, tmp_path):
    pids, code, output = ended(launcher, "raise", tmp_path)
    assert code == 1, output
    assert "ValueError: no such photo" in output
    assert f"rank 1 (host {os.uname().nodename}, pid {pids[1]}) failed and ends the job" in output
    if launcher == "plain":  # the process that started the ranks ends with the cause
        assert output.count("Traceback") == 1
        assert output.splitlines()[-1] == "lightning_ring: rank 1 failed: ValueError: no such photo"
    assert not list(tmp_path.glob("end.*"))


def test_the_first_error_is_shown_not_what_it_does_to_the_other_ranks(tmp_path):
    pids, code, output = ended("plain", "gloo", tmp_path)
    assert code == 1, output
    assert output.count("Traceback") == 1, output
    assert "ValueError: no such photo" in output
    assert "rank 0 ends: rank 1" in output
    assert f"rank 1 (pid {pids[1]}) ended with exit code 1; the job ends" in output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_killed_with_kill_9_is_named(launcher, tmp_path):
    pids, code, output = ended(launcher, "kill", tmp_path)
    family = mpi_family() if launcher == "mpirun" else ""
    assert code == (9 if family in ("mpich", "intelmpi") else 137), output
    assert "rank 1" in output.lower() or family == "mpich", "MPICH names the process only"
    assert str(pids[1]) in output
    assert "Traceback" not in output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sys_exit_on_one_rank_ends_the_job_with_its_code(launcher, tmp_path):
    _, code, output = ended(launcher, "exit-3", tmp_path)
    assert code == 3, output
    assert "exits with code 3 and ends the job" in output


def test_all_ranks_may_raise_and_go_on(tmp_path):
    _, code, output = ended("plain", "raise-all-caught", tmp_path)
    assert code == 0, output
    assert (tmp_path / "end.0").exists()


def test_an_exit_that_the_script_catches_is_none(tmp_path):
    _, code, output = ended("plain", "caught-exit", tmp_path)
    assert code == 1, output  # not 5
    assert "KeyError: 'after a caught exit'" in output


@needs_mpirun
def test_mpirun_killed_takes_the_ranks_along(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    with job("mpirun", "sleep", tmp_path) as (process, pids):
        segments = {path for pid in pids for path in mapped_segments(pid)}
        process.kill()
        assert_gone(pids)
    if mpi_family() != "mpich":  # it kills the ranks before they can remove its file of 2 MiB
        assert not [path for path in segments - before if path.exists()]


def mapped_segments(pid):
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in maps if "/dev/shm/" in line}


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("launcher", [pytest.param("ringrun", marks=needs_mpirun), "plain"])
def test_the_launcher_killed_takes_the_ranks_along_and_leaves_no_file(launcher, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with job(launcher, "sleep", tmp_path, TMPDIR=str(temporary)) as (process, pids):
        process.kill()
        assert_gone(pids)
    assert not list(temporary.glob("lightning_ring*"))


@needs_mpirun
def test_mpirun_killed_under_ringrun(tmp_path):
    killed = []

    def act(process, pids):
        killed.append(parent_of(pids[0]))
        if mpi_family() != "openmpi":  # a proxy of each host stands between
            killed.append(parent_of(killed[0]))
        os.kill(killed[-1], signal.SIGKILL)

    _, code, output = ended("ringrun", "sleep", tmp_path, act)
    assert code == 137, output
    assert f"mpirun (pid {killed[-1]}) was killed by signal 9 (SIGKILL)" in output


def test_ranks_that_do_not_stop_are_ended_after_the_grace(tmp_path):
    def act(process, pids):
        process.terminate()

    _, code, output = ended("plain", "wait", tmp_path, act, RING_STOP_GRACE="1")
    assert code == 143, output


def test_a_second_ctrl_c_ends_the_grace(tmp_path):
    def act(process, pids):
        process.send_signal(signal.SIGINT)
        # two at once would be one
        assert any("asking the ranks to stop" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)

    _, code, output = ended("plain", "wait", tmp_path, act, RING_STOP_GRACE="100")
    assert code == 130, output
