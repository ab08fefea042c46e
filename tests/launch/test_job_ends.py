"""What ends an elastic job, and its last line; nothing is left of it. Processes are real."""

import re
import sys
import time
from pathlib import Path

import pytest

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.processes import is_dead
from tests.launch.counting import KILL, counting, start
from tests.processes import AGENT, RINGRUN, START_ELASTIC, run, started, wait_for

pytestmark = pytest.mark.ranks


def start_with(seconds, limits, script):
    """As `start` does, with other limits of time of the supervisor."""
    code = f"import lightning_ring.launch.supervisor as s; s.{seconds}; {START_ELASTIC}"
    return run([sys.executable, "-c", code, limits, sys.executable, script])


LEAVES_BESIDE_DEATHS = """
open(f'{folder}/{number}.pid', 'w').write(str(os.getpid()))
def leave():
    while not all(os.path.exists(f'{folder}/{other}.log') for other in '02'):
        time.sleep(0.01)
    launcher = os.getppid()
    goes_on = f'sleep 0.5; kill -CONT {launcher}'
    subprocess.Popen(['sh', '-c', goes_on], start_new_session=True)
    os.kill(launcher, signal.SIGSTOP)
    for other in killed:
        os.kill(int(open(f'{folder}/{other}.pid').read()), signal.SIGKILL)
    os._exit(code)
if number == '1':
    when_counting(leave)
count()
"""


@pytest.mark.parametrize(
    ("killed", "code", "expected", "told"),
    [
        ("2", 9, 9, r"process 1 \(pid \d+\) ended with exit code 9; the job ends"),
        (
            "02",
            0,
            1,
            r"has ended: process 1 \(pid \d+\) left with exit code 0 without having finish",
        ),
    ],
)
def test_an_exit_ends_the_job_at_once_also_beside_deaths(killed, code, expected, told, tmp_path):
    """The launcher is stopped meanwhile, so that it sees all of them at the same time."""
    script = counting(tmp_path, f"killed, code = {killed!r}, {code}\n{LEAVES_BESIDE_DEATHS}")
    # those left are told, and not waited for
    done = start_with("PEERS_SECONDS = 600.0", "ElasticLimits(3)", script)
    assert done.returncode == expected, done.stdout
    assert re.search(told, done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize("hosts", ["", AGENT % (1, 2)])
def test_a_rank_that_failed_ends_the_job_and_is_named_before_its_memory_is_free(hosts, tmp_path):
    if hosts and not reachable_candidates({}):
        pytest.skip("this host has no address but its own loopback")
    fails = (
        "if number == '1':\n    memory = b'1' * 2**30; when_counting(lambda: os._exit(9))\ncount()"
    )
    script = counting(tmp_path, fails)
    done = start(f"ElasticLimits(3){hosts}", script, FAIL_SECONDS="0")  # the kernel takes longer
    assert done.returncode == 9, done.stdout
    assert re.search(
        r"process 1 \((host \w+, )?pid \d+\) ended with exit code 9; the job ends", done.stdout
    ), done.stdout
    assert "generation 1: " not in done.stdout  # the others do not connect anew


def test_too_few_ranks_end_the_job_with_the_names_of_the_dead(tmp_path):
    script = counting(tmp_path, f"if number == '0': when_counting({KILL})\ncount()\n")
    done = start(
        "ElasticLimits(2, 2, wait_for_ranks=1.0, respawn=RespawnLimits(delay=60.0))", script
    )
    assert done.returncode == 1, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    told = r"it has 1 rank left, after 1 s, and goes on with 2 or more \(--min-ranks\)\. Dead: "
    assert re.search(rf"{told}..:..:.. process 0 \(pid \d+\) was killed by signal 9", last), last


def test_the_cause_of_the_end_is_the_failure_and_not_an_earlier_death(tmp_path):
    fails = "if number == '1': when_counting(lambda: (time.sleep(1.0), os._exit(3)))\ncount()\n"
    script = counting(tmp_path, f"if number == '0': when_counting({KILL})\n{fails}")
    done = start("ElasticLimits(3)", script)
    assert done.returncode == 3, done.stdout
    assert re.search(r"process 0 \(pid \d+\) was killed", done.stdout)
    assert "ended with exit code 3; the job ends" in done.stdout
    assert "killed by signal 9 (SIGKILL); the job ends" not in done.stdout


DO_NOT_END = """
pid = os.getpid()
open(f'{folder}/pid.{number}', 'w').write(str(pid))
def note(*_):
    open(f'{folder}/ended.{number}', 'w')
    os._exit(3)
def when_2_is_stopped():
    stat = f'/proc/{open(folder + "/pid.2").read()}/stat'
    while open(stat).read().rpartition(')')[2].split()[0] != 'T':
        time.sleep(0.01)
    os._exit(9)
signal.signal(signal.SIGTERM, {'2': signal.SIG_DFL, '3': note}.get(number, signal.SIG_IGN))
if number == '1':
    when_counting(when_2_is_stopped)
if number == '2':
    when_counting(lambda: os.kill(pid, signal.SIGSTOP))
try:
    count()
finally:
    if number == '2':
        note()
    if number == '3':
        time.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3600)
"""


def test_ranks_that_do_not_end_with_their_job_are_ended(tmp_path):
    """Process 0 heeds nothing, and is killed. Stopped ones go on, so that they end: 2 learns why
    the job is over, as it was stopped before; 3, which stops itself then, gets SIGTERM."""
    script = counting(tmp_path, DO_NOT_END)
    done = start_with("_TERM_SECONDS, s.PEERS_SECONDS = 2.0, 3.0", "ElasticLimits(4)", script)
    assert done.returncode == 9, done.stdout
    assert {path.suffix for path in tmp_path.glob("ended.*")} == {".2", ".3"}, done.stdout
    assert all(is_dead(int(path.read_text())) for path in tmp_path.glob("pid.*"))


STARTS_A_CHILD = """
child = subprocess.Popen(['sleep', '300'])
open(f'{folder}/pids.{number}', 'w').write(f'{child.pid} {os.getpid()}')
count()
"""


def test_the_end_of_ringrun_ends_all_with_one_line(tmp_path):
    """Of ranks in wrappers, of what ranks have started, and of the process that guards them."""
    script = counting(tmp_path, STARTS_A_CHILD)
    shell = f"{sys.executable} {script}; exit $?"
    command = [*RINGRUN, "-n", "2", "--min-ranks", "1", "bash", "-c", shell]
    with started(command, tmp_path / "output") as job:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 2)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        files = [children, *tmp_path.glob("pids.*")]
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        job.kill()
    assert len(pids) == 3 + 4
    wait_for(lambda: all(is_dead(pid) for pid in pids))
    time.sleep(2.5)  # a rank that lived on would say a line of its own by then
    lines = [line for line in (tmp_path / "output").read_text().splitlines() if "gone" in line]
    assert lines == [
        f"lightning_ring: the process that started the ranks (pid {job.pid}) has gone: they end"
    ]
