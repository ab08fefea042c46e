"""What ends an elastic job, and its last line; nothing is left of it. Processes are real."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.processes import is_dead
from tests.launch.counting import AGENT, KILL, RANK, START, counting, start
from tests.processes import ROOT, clean_env, run, wait_for


@pytest.mark.ranks
def test_a_rank_that_fails_by_itself_ends_the_job(tmp_path):
    script = counting(
        tmp_path, "if number == '1': time.sleep(0.5); raise ValueError('no such column')\ncount()\n"
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
        (
            "02",
            0,
            1,
            r"the job has ended: process 1 \(pid \d+\) left with exit code 0 without having "
            r"finished",
        ),
    ],
)
def test_an_exit_ends_the_job_at_once_also_beside_deaths(killed, code, expected, told, tmp_path):
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
    patient = "import lightning_ring.launch.supervisor as s; s.PEERS_SECONDS = 600.0; " + START
    done = run([sys.executable, "-c", patient, "ElasticLimits(3)", script])
    assert done.returncode == expected, done.stdout
    assert re.search(told, done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("hosts", ["", AGENT])
def test_a_rank_that_failed_ends_the_job_and_is_named_before_its_memory_is_free(hosts, tmp_path):
    if hosts and not reachable_candidates({}):
        pytest.skip("this host has no address but its own loopback")
    script = counting(
        tmp_path,
        "if number == '1':\n    memory = b'1' * 2**30\n    when_counting(lambda: "
        "os._exit(9))\ncount()\n",
    )
    done = start(f"ElasticLimits(3){hosts}", script, FAIL_SECONDS="0")  # the kernel takes longer
    assert done.returncode == 9, done.stdout
    assert re.search(
        r"process 1 \((host \w+, )?pid \d+\) ended with exit code 9; the job ends", done.stdout
    ), done.stdout
    assert "generation 1: " not in done.stdout  # the others do not connect anew


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("limits", "waited"),
    [("", ""), (", wait_for_ranks=1.0, respawn=RespawnLimits(delay=60.0)", ", after 1 s")],
)
def test_too_few_ranks_end_the_job_with_the_names_of_the_dead(limits, waited, tmp_path):
    script = counting(tmp_path, f"if number == '0': when_counting({KILL})\ncount()\n")
    done = start(f"ElasticLimits(2, min_ranks=2{limits})", script)
    assert done.returncode == 1, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    told = (
        rf"it has 1 rank left{waited}, and goes on with 2 or more \(--min-ranks\)\. Dead: "
        r"..:..:.. process 0 "
    )
    assert re.search(told + r"\(pid \d+\) was killed by signal 9", last), done.stdout


@pytest.mark.ranks
def test_the_cause_of_the_end_is_the_failure_and_not_an_earlier_death(tmp_path):
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


@pytest.mark.ranks
def test_a_rank_that_leaves_without_having_finished_fails_the_job(tmp_path):
    script = counting(tmp_path, "if number == '1': when_counting(lambda: os._exit(0))\ncount()\n")
    done = start("ElasticLimits(2)", script)
    assert done.returncode == 1, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert re.search(
        r"process 1 \(pid \d+\) left with exit code 0 without having finished its training", last
    )


@pytest.mark.ranks
def test_ranks_that_do_not_end_with_their_job_are_ended(tmp_path):
    """Process 0 heeds nothing, and is killed. Stopped ones go on, so that they end: 2 learns why
    the job is over, as it was stopped before; 3, which stops itself then, gets SIGTERM."""
    script = counting(
        tmp_path,
        f"folder, pid = {str(tmp_path)!r}, os.getpid()\n"
        "open(f'{folder}/pid.{number}', 'w').write(str(pid))\n"
        "def note(*_): open(f'{folder}/ended.{number}', 'w'); os._exit(3)\n"
        "def when_2_is_stopped():\n"
        "    stat = f'/proc/{open(folder + \"/pid.2\").read()}/stat'\n"
        "    while open(stat).read().rpartition(')')[2].split()[0] != 'T': time.sleep(0.01)\n"
        "    os._exit(9)\n"
        "signal.signal(signal.SIGTERM, {'2': signal.SIG_DFL, '3': note}.get(number, signal.SIG_IGN))\n"
        "if number == '1': when_counting(when_2_is_stopped)\n"
        "if number == '2': when_counting(lambda: os.kill(pid, signal.SIGSTOP))\n"
        "try: count()\n"
        "finally:\n"
        "    if number == '2': note()\n"
        "    if number == '3': time.sleep(0.2); os.kill(pid, signal.SIGSTOP)\n"
        "    time.sleep(3600)\n",
    )
    soon = (
        "import lightning_ring.launch.supervisor as s; s._TERM_SECONDS = 2.0; s.PEERS_SECONDS = "
        "3.0; " + START
    )
    done = run([sys.executable, "-c", soon, "ElasticLimits(4)", script])
    assert done.returncode == 9, done.stdout
    assert {path.suffix for path in tmp_path.glob("ended.*")} == {".2", ".3"}, done.stdout
    assert all(is_dead(int(path.read_text())) for path in tmp_path.glob("pid.*"))


@pytest.mark.ranks
def test_what_a_dead_rank_started_ends_though_the_job_succeeds(tmp_path):
    script = counting(
        tmp_path,
        "if number == '1':\n    child = subprocess.Popen(['sleep', '300']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n    when_counting({KILL})\n"
        "count()\n",
        steps=80,
    )
    done = start("ElasticLimits(2)", script)
    assert done.returncode == 0, done.stdout
    assert is_dead(int((tmp_path / "pid").read_text()))


@pytest.mark.ranks
def test_no_steward_no_job(tmp_path):
    command = [
        sys.executable,
        "-c",
        START,
        "ElasticLimits(2)",
        RANK,
        str(tmp_path),
        "100000",
        "0.01",
    ]
    job = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 2)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        assert len(children) == 3  # one of them guards the others
    finally:
        job.kill()
        job.wait(timeout=60)
    wait_for(lambda: all(is_dead(int(child)) for child in children))


@pytest.mark.ranks
def test_the_end_of_ringrun_ends_all_with_one_line(tmp_path):
    """Of ranks in wrappers, and of what ranks have started."""
    script = counting(
        tmp_path,
        f"child = subprocess.Popen(['sleep', '300'])\nopen({str(tmp_path)!r} + '/pids.' + number, "
        f"'w').write(f'{{child.pid}} {{os.getpid()}}')\ncount()\n",
    )
    shell = f"{sys.executable} {script}; exit $?"
    command = [
        sys.executable,
        "-m",
        "lightning_ring.cli.ringrun",
        "-n",
        "2",
        "--min-ranks",
        "1",
        "bash",
        "-c",
        shell,
    ]
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(command, env=clean_env(), stderr=output, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 2)
    finally:
        job.kill()
        job.wait(timeout=60)
    pids = [int(pid) for file in tmp_path.glob("pids.*") for pid in file.read_text().split()]
    assert len(pids) == 4
    wait_for(lambda: all(is_dead(pid) for pid in pids))
    time.sleep(2.5)  # a rank that lived on would say a line of its own by then
    lines = [line for line in (tmp_path / "output").read_text().splitlines() if "gone" in line]
    assert lines == [
        f"lightning_ring: the process that started the ranks (pid {job.pid}) has gone: they end"
    ]
