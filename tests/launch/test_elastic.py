"""What a job outlives and what ends it, with real processes; respawns; how the kernel tells of a death."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.processes import failure_of, is_dead
from lightning_ring.launch.respawn import RespawnLimits, Respawns
from tests.processes import ROOT, clean_env, run

RANK = str(ROOT / "tests" / "membership" / "counting_rank.py")
KILL = "lambda: os.kill(os.getpid(), signal.SIGKILL)"
START = (
    "import sys; from lightning_ring.launch.elastic import *; from lightning_ring.membership.silence import *; "
    "from lightning_ring.launch import elastic; from lightning_ring.launch.hosts import Host; "
    "import os; elastic._FAIL_SECONDS = float(os.environ.get('FAIL_SECONDS', elastic._FAIL_SECONDS)); "
    "sys.exit(ElasticJob([sys.executable, *sys.argv[2:]], **eval(f'dict(limits={sys.argv[1]})')).run())"
)
AGENT = ", hosts=[Host('localhost', 1), Host('elsewhere', 2)], line=lambda host, line: ['sh', '-c', line]"


def counting(folder: Path, text: str, steps: int = 100000) -> str:
    """A script of ``text``, in which ``count()`` takes part (`counting_rank`); ``when_counting(call)`` calls later."""
    script = folder / "script.py"
    script.write_text(
        "import os, runpy, signal, subprocess, sys, threading, time\nnumber = os.environ.get('RING_MEMBER')\n"
        "def when_counting(call):\n"
        "    def wait():\n"
        f"        while not os.path.exists(f'{folder}/{{number}}.log'): time.sleep(0.01)\n"
        "        call()\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
        "def count():\n"
        f"    sys.argv = ['', {str(folder)!r}, '{steps}', '0.02']\n    runpy.run_path({RANK!r}, run_name='__main__')\n"
        + text
    )
    return str(script)


def start(limits: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", START, limits, *command], **env)


def test_respawns_come_later_each_time_and_end() -> None:
    respawns = Respawns(RespawnLimits(limit=3, delay=1.0, steady=60.0))
    assert respawns.died(7, now=100.0, lived=500.0)
    assert [respawns.take_due(now) for now in (100.5, 101.0, 101.5)] == [[], [7], []]
    assert respawns.died(7, now=110.0, lived=5.0)
    assert respawns.take_due(112.0) == [7]
    assert respawns.died(7, now=110.0, lived=5.0)
    assert respawns.pending == 1
    assert [respawns.take_due(now) for now in (112.0, 114.0)] == [[], [7]]
    assert not respawns.died(7, now=120.0, lived=5.0)
    assert respawns.died(7, now=300.0, lived=90.0)


def test_the_deaths_of_one_slot_do_not_count_for_another() -> None:
    respawns = Respawns(RespawnLimits(limit=2, delay=1.0, steady=60.0))
    assert [respawns.died(slot, now=0.0, lived=1.0) for slot in range(8)] == [True] * 8
    assert respawns.take_due(1.0) == list(range(8))
    assert [respawns.died(3, now=2.0, lived=1.0) for _ in range(2)] == [True, False]
    assert respawns.died(4, now=2.0, lived=1.0)


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
        process.kill()
        wait_for(lambda: is_dead(process.pid))
        assert failure_of(process.pid) == -signal.SIGKILL
        assert process.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.ranks
def test_a_rank_that_fails_by_itself_ends_the_job(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        "if number == '1': time.sleep(0.5); raise ValueError('no such column')\ncount()\n",
    )
    done = start("ElasticLimits(2)", script, RING_STOP_GRACE="2")
    assert done.returncode == 1, done.stdout
    assert "ValueError: no such column" in done.stdout
    assert "process 1 (pid" in done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("killed", "code", "expected", "told"),
    [
        ("2", 9, 9, r"process 1 \(pid \d+\) ended with exit code 9; the job ends"),
        ("02", 0, 1, r"the job has ended: process 1 \(pid \d+\) left with exit code 0 without having finished"),
    ],
)
def test_an_exit_ends_the_job_at_once_also_beside_deaths(
    killed: str, code: int, expected: int, told: str, tmp_path: Path
) -> None:
    """The launcher is stopped meanwhile, so that it sees all of them at the same time."""
    script = counting(
        tmp_path,
        f"folder = {str(tmp_path)!r}\n"
        "open(f'{folder}/{number}.pid', 'w').write(str(os.getpid()))\n"
        "def leave():\n"
        "    while not all(os.path.exists(f'{folder}/{other}.log') for other in '02'): time.sleep(0.01)\n"
        "    launcher = os.getppid()\n"
        "    subprocess.Popen(['sh', '-c', f'sleep 0.5; kill -CONT {launcher}'], start_new_session=True)\n"
        "    os.kill(launcher, signal.SIGSTOP)\n"
        f"    for other in {killed!r}: os.kill(int(open(f'{{folder}}/{{other}}.pid').read()), signal.SIGKILL)\n"
        f"    os._exit({code})\n"
        "if number == '1': when_counting(leave)\n"
        "count()\n",
    )
    # those left are told, and not waited for
    patient = "import lightning_ring.launch.elastic as e; e.PEERS_SECONDS = 600.0; " + START
    done = run([sys.executable, "-c", patient, "ElasticLimits(3)", script])
    assert done.returncode == expected, done.stdout
    assert re.search(told, done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("hosts", ["", AGENT])
def test_a_rank_that_failed_ends_the_job_and_is_named_before_its_memory_is_free(hosts: str, tmp_path: Path) -> None:
    if hosts and not reachable_candidates({}):
        pytest.skip("this host has no address but its own loopback")
    script = counting(
        tmp_path,
        "if number == '1':\n    memory = b'1' * 2**30\n    when_counting(lambda: os._exit(9))\ncount()\n",
    )
    done = start(f"ElasticLimits(3){hosts}", script, FAIL_SECONDS="0")  # the kernel takes longer
    assert done.returncode == 9, done.stdout
    assert re.search(r"process 1 \((host \w+, )?pid \d+\) ended with exit code 9; the job ends", done.stdout), (
        done.stdout
    )
    assert "generation 1: " not in done.stdout  # the others do not connect anew


@pytest.mark.ranks
def test_a_replacement_that_fails_after_the_training_has_finished_is_no_failure_of_the_job(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        f"if number == '1': when_counting({KILL})\n"
        "if number == '2':\n"
        f"    while not os.path.exists({str(tmp_path / '0.json')!r}): time.sleep(0.01)\n"
        "    time.sleep(0.5); os._exit(1)\n"
        "count()\n",
        steps=100,
    )
    done = start("ElasticLimits(2, respawn=RespawnLimits(delay=0.1))", script)
    assert done.returncode == 0, done.stdout
    assert re.search(r"process 2 \(pid \d+\) ended with exit code 1; 0 ranks are left", done.stdout), done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("limits", "waited"), [("", ""), (", wait_for_ranks=1.0, respawn=RespawnLimits(delay=60.0)", " for 1 s")]
)
def test_too_few_ranks_end_the_job_with_the_names_of_the_dead(limits: str, waited: str, tmp_path: Path) -> None:
    script = counting(tmp_path, f"if number == '0': when_counting({KILL})\ncount()\n")
    done = start(f"ElasticLimits(2, min_ranks=2{limits})", script)
    assert done.returncode == 1, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    told = (
        rf"1 of its ranks are left{waited}, and it goes on with 2 or more \(--min-ranks\)\. Dead: ..:..:.. process 0 "
    )
    assert re.search(told + r"\(pid \d+\) was killed by signal 9", last), done.stdout


@pytest.mark.ranks
def test_a_process_that_is_killed_while_the_job_begins_again_is_replaced(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        "from lightning_ring.membership.member import Member, Report\n"
        "if not os.environ['RING_RESUME_FROM']:\n"
        "    member = Member(); member.open(); member.report(Report()); member.next_view(60); time.sleep(0.5)\n"
        "    if number == '2': time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    member.lose_state('A shard is lost.', 'last.ckpt', 1); os._exit(1)\n"
        "count()\n",
        steps=150,
    )
    done = start("ElasticLimits(3, respawn=RespawnLimits(delay=0.1))", script)
    assert done.returncode == 0, done.stdout
    assert "A shard is lost. 3 processes begin again from last.ckpt" in done.stdout
    assert re.search(r"process 2 \(pid \d+\) was killed by signal 9 .* a new process replaces it", done.stdout)
    assert {path.stem for path in tmp_path.glob("*.json")} == {"3", "4", "5"}, done.stdout


@pytest.mark.ranks
def test_a_rank_that_keeps_dying_is_replaced_until_the_limit(tmp_path: Path) -> None:
    script = counting(tmp_path, "if number == '0': count()\nos.kill(os.getpid(), signal.SIGSEGV)\n", steps=60)
    done = start("ElasticLimits(2, respawn=RespawnLimits(limit=2, delay=0.01))", script)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("killed by signal 11 (SIGSEGV); ") == 3, done.stdout
    assert done.stdout.count("a new process replaces it") == 2
    assert "no other process replaces it, after 3 deaths in a row" in done.stdout
    last = done.stdout.strip().splitlines()[-1]  # why a slot is empty is said at the end
    assert "slot 1 stays empty, 3 processes died one after the other; the last: process 3 (pid" in last, done.stdout
    assert len(json.loads((tmp_path / "0.json").read_text())) == 60


@pytest.mark.ranks
def test_no_steward_no_job(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, "ElasticLimits(2)", RANK, str(tmp_path), "100000", "0.01"]
    job = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 2)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(children) == 3  # one of them guards the others
    finally:
        job.kill()
        job.wait(timeout=10)
    wait_for(lambda: all(is_dead(int(child)) for child in children))


@pytest.mark.ranks
def test_the_cause_of_the_end_is_the_failure_and_not_an_earlier_death(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        f"if number == '0': when_counting({KILL})\n"
        "if number == '1': when_counting(lambda: (time.sleep(1.0), os._exit(3)))\n"
        "count()\n",
    )
    done = start("ElasticLimits(3)", script)
    assert done.returncode == 3, done.stdout
    assert "process 0 (pid" in done.stdout
    assert "ended with exit code 3; the job ends" in done.stdout
    assert "killed by signal 9 (SIGKILL); the job ends" not in done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.ranks
def test_stopped_and_hanging_ranks_are_killed_and_the_others_go_on(tmp_path: Path) -> None:
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
    told = [line for line in done.stdout.splitlines() if "process 1 (" in line]
    assert len(told) == 1, done.stdout
    assert re.search(r"killed by signal 9 \(SIGKILL\) \(it has neither answered nor used processor time for", told[0])
    assert re.search(
        r"process 2 \(pid \d+\) was killed.*\(it was started, and has used no processor time for \d+ s \(it hangs\)\)",
        done.stdout,
    )
    assert len(json.loads((tmp_path / "0.json").read_text())) == 60


@pytest.mark.ranks
def test_the_rank_in_a_wrapper_is_watched_and_its_session_ends_with_it(tmp_path: Path) -> None:
    """A shell starts each rank, which starts a child and is killed; the shell would go on for ten minutes."""
    script = counting(
        tmp_path,
        "if number == '1':\n"
        f"    child = subprocess.Popen(['sleep', '300']); open({str(tmp_path / 'pids')!r}, 'w').write("
        "f'{child.pid} {os.getppid()} {os.getpid()}')\n"
        f"    when_counting({KILL})\n"
        "count()\n",
        steps=100,
    )
    command = ["-m", "lightning_ring.cli.ringrun", "-n", "2", "--min-ranks", "1"]
    shell = f"{sys.executable} {script}; code=$?; [ $RING_MEMBER = 0 ] || sleep 600; exit $code"
    done = run([sys.executable, *command, "bash", "-c", shell])
    assert done.returncode == 0, done.stdout
    assert "generation 1: 1 ranks" in done.stdout
    child, wrapper, rank = map(int, (tmp_path / "pids").read_text().split())
    assert f"process 1 (pid {rank}) was killed" in done.stdout
    assert is_dead(wrapper)
    assert is_dead(child)


@pytest.mark.ranks
def test_what_a_dead_rank_started_ends_though_the_job_succeeds(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        "if number == '1':\n"
        f"    child = subprocess.Popen(['sleep', '300']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"    when_counting({KILL})\n"
        "count()\n",
        steps=80,
    )
    done = start("ElasticLimits(2)", script)
    assert done.returncode == 0, done.stdout
    assert is_dead(int((tmp_path / "pid").read_text()))


@pytest.mark.ranks
def test_a_rank_that_leaves_without_having_finished_fails_the_job(tmp_path: Path) -> None:
    script = counting(tmp_path, "if number == '1': when_counting(lambda: os._exit(0))\ncount()\n")
    done = start("ElasticLimits(2)", script)
    assert done.returncode == 1, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert re.search(r"process 1 \(pid \d+\) left with exit code 0 without having finished its training", last)


@pytest.mark.ranks
def test_a_newcomer_that_fails_does_not_end_the_job(tmp_path: Path) -> None:
    script = counting(
        tmp_path,
        f"if int(number) > 1: raise RuntimeError('no GPU here')\nif number == '1': when_counting({KILL})\ncount()\n",
        steps=120,
    )
    done = start("ElasticLimits(2, respawn=RespawnLimits(limit=2, delay=0.01))", script)
    assert done.returncode == 0, done.stdout
    assert "process 3 (pid" in done.stdout
    assert "ended with exit code 1" in done.stdout.strip().splitlines()[-1], done.stdout


@pytest.mark.ranks
def test_the_end_of_ringrun_ends_all_with_one_line(tmp_path: Path) -> None:
    """Of ranks in wrappers, and of what ranks have started."""
    script = counting(
        tmp_path,
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(tmp_path)!r} + '/pids.' + number, 'w').write(f'{{child.pid}} {{os.getpid()}}')\ncount()\n",
    )
    shell = f"{sys.executable} {script}; exit $?"
    command = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "2", "--min-ranks", "1", "bash", "-c", shell]
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(command, env=clean_env(), stderr=output, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 2)
    finally:
        job.kill()
        job.wait(timeout=10)
    pids = [int(pid) for file in tmp_path.glob("pids.*") for pid in file.read_text().split()]
    assert len(pids) == 4
    wait_for(lambda: all(is_dead(pid) for pid in pids))
    time.sleep(2.5)  # a rank that lived on would say a line of its own by then
    lines = [line for line in (tmp_path / "output").read_text().splitlines() if "gone" in line]
    assert lines == [f"lightning_ring: the process that started the ranks (pid {job.pid}) has gone: they end"]


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match="runs on Linux only, and this is darwin"):
        ElasticJob(["true"], ElasticLimits(2)).run()


@pytest.mark.ranks
def test_plain_python_is_the_steward_of_its_own_ranks(tmp_path: Path) -> None:
    """The script starts itself as ranks; one of them is killed and replaced."""
    script = counting(
        tmp_path,
        "from lightning_ring.job.launchers.elastic import started_by_steward\n"
        "from lightning_ring.launch.script import JobFinished, elastic_script_job\n"
        "from lightning_ring.launch.elastic import ElasticLimits, RespawnLimits\n"
        "if not started_by_steward(os.environ):\n"
        "    with elastic_script_job(ElasticLimits(2, min_ranks=1, respawn=RespawnLimits())) as job:\n"
        "        raise JobFinished(job.run())\n"
        f"if number == '1': when_counting({KILL})\n"
        "count()\n",
        steps=200,
    )
    done = run([sys.executable, script])
    assert done.returncode == 0, done.stdout
    assert "2 ranks, 1 of them new" in done.stdout
    assert len(json.loads((tmp_path / "2.json").read_text())) == 200


@pytest.mark.ranks
def test_ranks_that_do_not_end_with_their_job_are_ended(tmp_path: Path) -> None:
    """Process 0 heeds nothing, and is killed. Stopped ones go on, so that they end: 2 learns why the job is over, as it
    was stopped before; 3, which stops itself then, gets SIGTERM."""
    script = counting(
        tmp_path,
        f"folder, pid = {str(tmp_path)!r}, os.getpid()\n"
        "open(f'{folder}/pid.{number}', 'w').write(str(pid))\n"
        "def note(*_): open(f'{folder}/ended.{number}', 'w'); os._exit(3)\n"
        "def when_2_is_stopped():\n"
        "    stat = f'/proc/{open(folder + \"/pid.2\").read()}/stat'\n"
        "    while open(stat).read().rpartition(')')[2].split()[0] != 'T': time.sleep(0.01)\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, note if number == '3' else signal.SIG_IGN)\n"
        "if number == '1': when_counting(when_2_is_stopped)\n"
        "if number == '2': when_counting(lambda: os.kill(pid, signal.SIGSTOP))\n"
        "try: count()\n"
        "finally:\n"
        "    if number == '2': note()\n"
        "    if number == '3': time.sleep(0.2); os.kill(pid, signal.SIGSTOP)\n"
        "    time.sleep(3600)\n",
    )
    soon = "import lightning_ring.launch.supervisor as s; s._TERM_SECONDS = 3.0; " + START
    command = [sys.executable, "-c", soon, "ElasticLimits(4, min_ranks=4)", script]
    done = run(command, RING_STOP_GRACE="0.6")
    assert done.returncode == 1, done.stdout
    assert "(--min-ranks)" in done.stdout.strip().splitlines()[-1]
    assert {path.suffix for path in tmp_path.glob("ended.*")} == {".2", ".3"}
    assert all(is_dead(int(path.read_text())) for path in tmp_path.glob("pid.*"))
