"""A whole examination of this host, and that the doctor itself always ends and leaves nothing
behind.
"""

import json
import signal
import sys

import pytest

from lightning_ring.cli import doctor as command
from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.processes import processes_of_sessions
from lightning_ring.tools.doctor.asking import DoctorRequest, ask
from lightning_ring.tools.doctor.findings import (
    HostReport,
    compare,
    last_line,
    lines,
    ok,
    short,
    warning,
)
from lightning_ring.tools.doctor.launching import check_engine, check_launcher
from lightning_ring.tools.doctor.reduction import what_was_said
from tests import forked
from tests.job.test_launchers import FLUX, JSRUN, SRUN_STEP
from tests.processes import has_ended, mpirun_path, run, started, wait_for
from tests.tools.doctor.planting import doctor, program

WHOLE = """
import sys
from lightning_ring.cli.main import main
code = main(["doctor"])
print("imported:", sorted(sys.modules.keys() & {"torch", "lightning", "mpi4py", "mpi4py.MPI"}))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ([], "none: this is an ordinary shell"),
        (["RAY_JOB_ID", "KUBERNETES_SERVICE_HOST"], "Ray in Kubernetes"),
        (["PBS_JOBID", "PBS_NODEFILE"], "PBS"),
        (["LSB_JOBID"], "LSF"),
    ],
)
def test_the_engine_is_named(variables, engine):
    request = DoctorRequest(2, 1, 60, environ=dict.fromkeys(variables, "1"))
    assert check_engine(request) == [ok("engine", engine)]


RAY_WORKER = {"RAY_JOB_ID": "1", "RANK": "1", "LOCAL_RANK": "1"}
RAY_WORKER |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (RAY_WORKER, "rank 1 of 2, by the variables of RANK, WORLD_SIZE, started by Ray"),
        (JSRUN, "rank 5 of 8, by the variables of jsrun, started by LSF"),
        (FLUX, "rank 5 of 8, by the variables of Flux, started by Flux"),
    ],
)
def test_an_engine_started_the_rank(environ, found):
    assert check_launcher(DoctorRequest(2, 1, 60, environ=environ)) == [ok("launcher", found)]


@pytest.mark.parametrize(
    ("environ", "found", "advice"),
    [
        (SRUN_STEP, "variables of srun, but no launcher started this process", "${!SLURM_@}"),
        ({"WORLD_SIZE": "4"}, "RANK is not set", "Unset them."),
        (OMPI, "rank 0 of 2, by", "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_variables_that_are_left_can_be_unset(environ, found, advice):
    [finding] = check_launcher(DoctorRequest(2, 1, 60, environ=environ))
    assert finding.state == "broken"
    assert found in finding.found
    assert finding.advice.endswith(advice)


@pytest.mark.ranks
def test_a_whole_examination():
    done = run([sys.executable, "-c", WHOLE], **forked.ranks())
    lines = done.stdout.splitlines()
    assert lines[-1] == "imported: []", "what can break was imported into the doctor itself"
    findings = {
        line[9:28].strip(): line
        for line in lines[:-2]
        if line[:8].strip() in ("ok", "warning", "broken")
    }
    assert done.returncode == any(line.startswith("broken") for line in findings.values())
    assert lines[-2].startswith(f"{len(findings)} checks: "), done.stdout
    names = {"python", "torch", "lightning", "mpi4py", "gloo", "nccl", "cores"}
    assert names | {"import torch", "import lightning"} <= findings.keys(), done.stdout
    how = "2 ranks through mpirun" if mpirun_path() else "2 ranks without MPI"
    for backend in ("auto", "gloo", *(["mpi"] if mpirun_path() else [])):
        line = findings[f"all-reduce, {backend}"]
        assert not line.startswith("broken"), done.stdout
        assert f"{how}: every sum right" in line


def test_a_program_that_hangs_is_ended_with_all_that_it_started():
    answer = ask(["sh", "-c", "echo begun; sleep 1000 & echo $$; wait"], 0.5)
    begun, pid = answer.stdout.split()
    assert (begun, answer.problem) == ("begun", "did not end within 0.5 s")
    assert "--timeout 300" in answer.advice("Reinstall it.")
    # a grandchild is there until somebody takes note of its end
    wait_for(lambda: not processes_of_sessions({int(pid)}))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sh", "-c", "kill -SEGV $$"], "was ended by signal 11 (SIGSEGV)"),
        (["sh", "-c", "exit 3"], "ended with exit code 3"),
        (["/no/such/program"], "cannot be run: No such file or directory"),
        (["true"], ""),
    ],
)
def test_a_program_that_fails_is_an_answer(words, problem):
    assert ask(words, 10).problem == problem


@pytest.mark.ranks
def test_told_to_stop_it_ends_what_it_started(environment, tmp_path):
    program(environment / "bin", "mpirun", f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    words = ["-m", "lightning_ring.cli.main", "doctor", "--only", "mpi", "threads"]
    asked = tmp_path / "pid"
    with started([str(environment / "bin" / "python"), *words], tmp_path / "output") as process:
        wait_for(lambda: asked.exists() and asked.read_text())
        process.terminate()
        assert process.wait(timeout=240) == 128 + signal.SIGINT
    assert has_ended(int(asked.read_text()))


@pytest.mark.ranks
@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python")
def test_ranks_that_hang_are_ended_and_said_to_be_late(environment, tmp_path):
    """An mpirun that never comes back, and a limit that is too short for ranks without it, too."""
    script = (
        f"[ $1 = --version ] && exec {mpirun_path()} --version; echo $$ > {tmp_path}/pid; exec "
        "sleep 1000"
    )
    program(environment / "bin", "mpirun", script)
    report = doctor("--timeout", "1", only=["all-reduce"], environment=environment)
    late = [finding["found"] for finding in report.read["hosts"][0]["findings"]]
    assert late == [
        "2 ranks through mpirun: it did not end within 1 s, before the ranks had met",
        "2 ranks without MPI: it did not end within 1 s, before the ranks had met",
    ]
    assert has_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "-n 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["-H", "a:x"], "host:slots"),
        (["--hostfile", "/no/such/file"], "No such file"),
    ],
)
def test_bad_command_lines(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        command.main(arguments)


def test_a_report_of_several_hosts_shows_what_is_not_ok_and_counts_the_rest():
    few = warning("threads", "64 threads", "Set 1.")
    one = HostReport("one", [ok("torch", "2.9.0"), ok("python", "3.12.1"), few])
    two = HostReport("two", [ok("torch", "2.8.0"), ok("python", "3.12.9")])
    assert json.loads(json.dumps(one.as_json()))["state"] == "warning"
    assert [line.split()[:2] for line in lines(short(one.findings))] == [
        ["warning", "threads"],
        ["->", "Set"],
        ["ok", "all"],
    ]
    between = compare([one, two])
    assert [(finding.name, finding.state) for finding in between] == [
        ("torch differs", "broken"),
        ("same on all hosts", "ok"),
    ]
    assert between[0].found == "2.9.0 on one; 2.8.0 on two"
    assert last_line([*one.findings, *two.findings, *between]) == "7 checks: 1 broken, 1 warning"


def test_the_line_that_says_most_is_chosen():
    stderr = """lightning_ring: /venv/bin/mpirun -n 2 python
Traceback (most recent call last):
  File "rank.py", line 3, in <module>
lightning_ring.errors.CollectiveError: all-reduce of 'doctor, gloo' did not end within 20 s
--------------------------------------------------------------------------
prterun has exited due to process rank 0
"""
    assert what_was_said(stderr).startswith("lightning_ring.errors.CollectiveError: all-reduce")
    assert (
        what_was_said("-----\nssh: Could not resolve hostname a\n-----\n")
        == "ssh: Could not resolve hostname a"
    )
    assert what_was_said("") == ""
