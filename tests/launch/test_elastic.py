"""What a job outlives and what ends it, with real processes; respawns; how the kernel tells of a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.elastic import ElasticLimits
from lightning_ring.launch.processes import is_dead
from lightning_ring.launch.respawn import RespawnLimits, Respawns
from tests.processes import ROOT, run

RANK = str(ROOT / "tests" / "membership" / "counting_rank.py")
START = (
    "import sys; from lightning_ring.launch.elastic import *; from lightning_ring.launch.respawn import *; "
    "sys.exit(ElasticJob([sys.executable, *sys.argv[2:]], eval(sys.argv[1])).run())"
)


def start(limits: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", START, limits, *command], timeout=60, **env)


def test_respawns_come_later_each_time_and_end() -> None:
    respawns = Respawns(RespawnLimits(limit=3, delay=1.0, steady=60.0))
    assert respawns.died(now=100.0, lived=500.0)
    assert [respawns.take_due(now) for now in (100.5, 101.0, 101.5)] == [0, 1, 0]
    assert respawns.died(now=110.0, lived=5.0)
    assert respawns.died(now=110.0, lived=5.0)
    assert respawns.pending == 2
    assert [respawns.take_due(now) for now in (112.0, 114.0)] == [1, 1]
    assert not respawns.died(now=120.0, lived=5.0)
    assert respawns.died(now=300.0, lived=90.0)


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="2 ranks, at least 3 and at most 2"):
        ElasticLimits(2, min_ranks=3)


@pytest.mark.ranks
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_process_is_seen_to_be_dead_before_its_memory_is_free() -> None:
    code = "import mmap; m = mmap.mmap(-1, 2**29); m[::4096] = bytes(2**17); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert not is_dead(process.pid)
        killed = time.monotonic()
        process.kill()
        while not is_dead(process.pid):
            assert time.monotonic() - killed < 5
        assert process.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.ranks
def test_a_rank_that_fails_by_itself_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import os, runpy, sys, time\n"
        f"if os.environ['RING_MEMBER'] != '1': sys.argv = ['', {str(tmp_path)!r}, '100000']; "
        f"runpy.run_path({RANK!r}, run_name='__main__')\n"
        "time.sleep(0.5); raise ValueError('no such column')\n"
    )
    done = start("ElasticLimits(2)", str(script), RING_STOP_GRACE="2")
    assert done.returncode == 1, done.stdout
    assert "ValueError: no such column" in done.stdout
    assert "process 1 (pid" in done.stdout


@pytest.mark.ranks
def test_too_few_ranks_end_the_job_with_the_names_of_the_dead(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, runpy, signal, sys, threading\n"
        "if os.environ['RING_MEMBER'] == '0': "
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        f"sys.argv = ['', {str(tmp_path)!r}, '100000', '0.01']; runpy.run_path({RANK!r}, run_name='__main__')\n"
    )
    done = start("ElasticLimits(2, min_ranks=2)", str(script))
    assert done.returncode == 1, done.stdout
    assert "1 of its ranks are left, and it goes on with 2 or more (--min-ranks). Dead: process 0 (pid" in done.stdout


@pytest.mark.ranks
def test_a_rank_that_keeps_dying_is_replaced_until_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"if os.environ['RING_MEMBER'] == '0': sys.argv = ['', {str(tmp_path)!r}, '60', '0.02']; "
        f"runpy.run_path({RANK!r}, run_name='__main__')\n"
        "os.kill(os.getpid(), 11)\n"
    )
    done = start("ElasticLimits(2, respawn=RespawnLimits(limit=2, delay=0.01))", str(script))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("killed by signal 11 (SIGSEGV)") == 3, done.stdout
    assert done.stdout.count("a new process takes its place") == 2
    assert len(json.loads((tmp_path / "0.json").read_text())) == 60


@pytest.mark.ranks
def test_no_steward_no_job(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, "ElasticLimits(2)", RANK, str(tmp_path), "100000", "0.01"]
    job = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("*.log"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(children) == 2
    finally:
        job.kill()
        job.wait(timeout=10)
    until = time.monotonic() + 10
    while not all(is_dead(int(child)) for child in children):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.ranks
def test_the_cause_of_the_end_is_the_failure_and_not_an_earlier_death(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import os, runpy, signal, sys, threading, time\n"
        "number = os.environ['RING_MEMBER']\n"
        "def end():\n"
        "    if number == '0': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if number == '1': time.sleep(1.0); os._exit(3)\n"
        "threading.Timer(1.0, end).start()\n"
        f"sys.argv = ['', {str(tmp_path)!r}, '100000', '0.01']; runpy.run_path({RANK!r}, run_name='__main__')\n"
    )
    done = start("ElasticLimits(3)", str(script))
    assert done.returncode == 3, done.stdout
    assert "process 0 (pid" in done.stdout
    assert "ended with exit code 3; the job ends" in done.stdout
    assert "killed by signal 9 (SIGKILL); the job ends" not in done.stdout
