"""A forked rank ends, is signalled and is started as a process of its own is."""

import signal
import sys

import pytest

from tests import forked
from tests.processes import assert_gone, end_session, run, start

pytestmark = pytest.mark.ranks
SLEEPS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("raise SystemExit('why')", 1),
        ("raise ValueError('why')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("import atexit; atexit.register(print, 'why'); raise SystemExit(4)", 4),
    ],
)
def test_it_ends_as_python_does(code, returncode):
    plain, rank = (run([*python, "-c", code]) for python in ([sys.executable], forked.python()))
    assert plain.returncode == rank.returncode == returncode
    assert plain.stdout.splitlines()[-1:] == rank.stdout.splitlines()[-1:]


def test_its_libraries_are_there_and_mpi_is_not():
    names = "{'lightning', 'lightning_ring', 'mpi4py.MPI'}"
    code = f"import sys; print(sorted(sys.modules.keys() & {names}), sys.argv)"
    there = run([*forked.python(), "-c", code, "a"]).stdout
    assert there == "['lightning', 'lightning_ring'] ['-c', 'a']\n"


@pytest.mark.parametrize("ended", ["by SIGTERM", "with its small process", "with its session"])
def test_no_rank_outlives_its_small_process(ended):
    process = start([*forked.python(), "-c", SLEEPS])
    pid = int(process.stdout.readline())
    assert pid != process.pid
    if ended == "by SIGTERM":
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    elif ended == "with its session":
        end_session(process)
    else:
        process.kill()
    process.wait(60)
    assert_gone([pid])
