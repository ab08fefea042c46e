"""How elastic jobs are started and watched: by plain Python, in wrappers; how the kernel tells
of a death.
"""

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.processes import failure_of, is_dead
from tests.launch.counting import KILL, counting, start
from tests.processes import RINGRUN, run, started, wait_for


def test_a_process_is_not_dead_because_no_file_can_be_opened(monkeypatch):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    for method in ("read_text", "iterdir"):
        monkeypatch.setattr(Path, method, full)
    assert not is_dead(os.getpid())
    assert is_dead(2**22 + 1)  # more than there can be


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="runs on Linux only, and this is darwin"):
        ElasticJob(["true"], ElasticLimits(2)).run()


@pytest.mark.ranks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_process_is_seen_to_be_dead_before_its_memory_is_free():
    code = "import mmap; m = mmap.mmap(-1, 2**29); m[::4096] = bytes(2**17); print(); input()"
    with started([sys.executable, "-c", code]) as process:
        process.stdout.readline()
        assert not is_dead(process.pid)
        process.kill()
        wait_for(lambda: is_dead(process.pid))
        assert failure_of(process.pid) == -signal.SIGKILL
        assert process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.ranks
def test_stopped_and_hanging_ranks_are_killed_and_the_others_go_on(tmp_path):
    """Process 1 is stopped in the middle of a step, process 2 hangs before it connects."""
    script = counting(
        tmp_path,
        "if number == '1': when_counting(lambda: os.kill(os.getpid(), signal.SIGSTOP))\n"
        "if number == '2': time.sleep(3600)\n"
        "count()\n",
        steps=60,
    )
    done = start("ElasticLimits(3, silence=SilenceLimits(answer=2.0, start=4.0))", script)
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if "process 1 (" in line and "killed" in line]
    assert len(told) == 1, done.stdout
    assert re.search(
        r"killed by signal 9 \(SIGKILL\) \(it has neither answered nor used processor time for",
        told[0],
    )
    assert re.search(
        r"process 2 \(pid \d+\) was killed.*\(it was started, and has used no processor time for "
        r"\d+ s \(it hangs\)\)",
        done.stdout,
    )
    assert len(json.loads((tmp_path / "0.json").read_text())) == 60


STARTS_A_CHILD = """
if number == '1':
    child = subprocess.Popen(['sleep', '300'])
    open(f'{folder}/pids', 'w').write(f'{child.pid} {os.getppid()} {os.getpid()}')
"""


@pytest.mark.ranks
def test_the_rank_in_a_wrapper_is_watched_and_its_session_ends_with_it(tmp_path):
    """A shell starts each rank, which starts a child and is killed; the shell would go on for
    ten minutes.
    """
    script = counting(tmp_path, f"{STARTS_A_CHILD}    when_counting({KILL})\ncount()\n", steps=100)
    command = [*RINGRUN, "-n", "2", "--min-ranks", "1"]
    shell = f"{sys.executable} {script}; code=$?; [ $RING_MEMBER = 0 ] || sleep 600; exit $code"
    done = run([*command, "bash", "-c", shell])
    assert done.returncode == 0, done.stdout
    assert "generation 1: 1 rank" in done.stdout
    child, wrapper, rank = map(int, (tmp_path / "pids").read_text().split())
    assert f"process 1 (pid {rank}) was killed" in done.stdout
    assert is_dead(wrapper)
    assert is_dead(child)
