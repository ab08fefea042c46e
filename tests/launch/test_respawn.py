"""Processes that take the place of dead ones: when they start, how many, and what their own end
means.
"""

import json
import re

import pytest

from lightning_ring.launch.process_ends import RespawnLimits, Respawns
from tests.launch.counting import KILL, counting, start


def test_respawns_come_later_each_time_and_end():
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


def test_the_deaths_of_one_slot_do_not_count_for_another():
    respawns = Respawns(RespawnLimits(limit=2, delay=1.0, steady=60.0))
    assert [respawns.died(slot, now=0.0, lived=1.0) for slot in range(8)] == [True] * 8
    assert respawns.take_due(1.0) == list(range(8))
    assert [respawns.died(3, now=2.0, lived=1.0) for _ in range(2)] == [True, False]
    assert respawns.died(4, now=2.0, lived=1.0)


@pytest.mark.ranks
def test_a_rank_that_keeps_dying_is_replaced_until_the_limit(tmp_path):
    script = counting(
        tmp_path, "if number == '0': count()\nos.kill(os.getpid(), signal.SIGSEGV)\n", steps=60
    )
    done = start("ElasticLimits(2, respawn=RespawnLimits(limit=2, delay=0.01))", script)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("killed by signal 11 (SIGSEGV); ") == 3, done.stdout
    assert done.stdout.count("a new process replaces it") == 2
    assert "no other process replaces it, after 3 deaths in a row" in done.stdout
    last = done.stdout.strip().splitlines()[-1]  # why a slot is empty is said at the end
    assert (
        "slot 1 stays empty, 3 processes died one after the other; the last: process 3 (pid" in last
    ), done.stdout
    assert len(json.loads((tmp_path / "0.json").read_text())) == 60


FAILS_LATE = """
if number == '2':
    while not os.path.exists(f'{folder}/0.json'):
        time.sleep(0.01)
    time.sleep(0.5)
    os._exit(1)
count()
"""


@pytest.mark.ranks
def test_a_replacement_that_fails_after_the_training_has_finished_is_no_failure_of_the_job(
    tmp_path,
):
    script = counting(tmp_path, f"if number == '1': when_counting({KILL})\n{FAILS_LATE}", steps=100)
    done = start("ElasticLimits(2, respawn=RespawnLimits(delay=0.1))", script)
    assert done.returncode == 0, done.stdout
    assert re.search(r"process 2 \(pid \d+\) ended with exit code 1; 0 ranks left", done.stdout), (
        done.stdout
    )
