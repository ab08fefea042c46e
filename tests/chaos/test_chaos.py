"""Planted faults: a few of ``python -m tests.chaos``, and that its checks find what they look
for."""

import json

import pytest

from tests import forked
from tests.chaos.checks import check_samples, check_steps
from tests.chaos.plan import BATCH, SAMPLES, Plan, draw
from tests.processes import run

SEED, FAULTS = 9012, 4


@pytest.mark.ranks
def test_fits_with_planted_faults_lose_nothing():
    """One hundred: ``python -m tests.chaos --faults 100``."""
    command = [*forked.python(), "-m", "tests.chaos", "--seed", str(SEED), "--faults", str(FAULTS)]
    done = run(command)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["faults"] >= FAULTS


def write(folder, name, *lines):
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        ([[0, 2, "b", []], [0, 3, "c", []]], []),
        ([[0, 2, "b", []], [0, 3, "x", []]], ["ranks differ after step 3 of generation 0"]),
        ([[0, 5, "e", []]], ["steps are missing: [1, 2, 3, 5], expected from 1 on"]),
        ([[1, 3, "c", [2]]], ["a callback has counted [2] steps of 3"]),
    ],
)
def test_steps_that_differ_or_are_missing_are_found(second, wrong, tmp_path):
    write(tmp_path, "0.steps", [0, 1, "a", []], [0, 2, "b", []], [0, 3, "c", []])
    write(tmp_path, "1.steps", *second)
    with (tmp_path / "1.steps").open("a") as log:
        log.write("[4, ")  # of a process that was killed
    assert check_steps(tmp_path) == wrong


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda samples: samples[: -BATCH + 1], []),
        (lambda samples: samples[:-BATCH], [f"epoch 0 left out {BATCH} samples"]),
        (lambda samples: [samples[5], *samples], ["epoch 0 trained on 1 samples twice"]),
    ],
)
def test_samples_that_are_read_twice_or_left_out_are_found(change, wrong, tmp_path):
    """The first attempt of a step that was done again does not count."""
    every = list(range(SAMPLES))
    write(
        tmp_path,
        "0.samples",
        [0, 0, 0, 0, [1, 1]],
        [0, 0, 0, 1, change(every)],
        [1, 1, 0, 0, every],
    )
    assert check_samples(tmp_path, Plan(0, ranks=1)) == wrong


@pytest.mark.parametrize(
    ("resumes", "wrong"), [(1, []), (3, ["steps are missing: [4], expected from 3 on"])]
)
def test_after_a_checkpoint_there_is_another_history(resumes, wrong, tmp_path):
    """All ranks went back to step 1, with generation 1, and did steps 2 and 3 again."""
    every = list(range(SAMPLES))
    write(tmp_path, "0.backs", 1)
    write(tmp_path, "0.steps", [0, 1, "a", []], [0, 2, "b", []])
    write(tmp_path, "1.steps", *([1, step, f"x {step}", []] for step in range(resumes + 1, 5)))
    assert check_steps(tmp_path) == wrong
    before = [0, 0, 0, 0, every], [1, 1, 0, 0, every[:9]], [1, 1, 0, 1, every], [1, 2, 0, 0, every]
    write(tmp_path, "0.samples", *before)
    write(tmp_path, "1.samples", [1, 1, 1, 0, every])
    assert check_samples(tmp_path, Plan(0, ranks=1)) == []


def test_a_seed_is_a_plan_and_one_rank_beside_the_steward_lives():
    for seed in range(300):
        plan = draw(seed)
        assert plan == draw(seed)
        faulty = {fault.number for fault in plan.faults}
        here = [number for number in range(plan.ranks) if plan.host_of(number) == 0]
        assert set(here) - faulty, plan
