import math
import pickle

import pytest

from lightning_ring.schedules import gradual_warmup, warmup_cosine, warmup_multistep, warmup_poly


def test_gradual_warmup_is_a_straight_line_then_one():
    factor = gradual_warmup(5, start_factor=0.2)
    assert [factor(step) for step in range(8)] == pytest.approx(
        [0.2, 0.36, 0.52, 0.68, 0.84, 1, 1, 1]
    )
    assert gradual_warmup(0)(0) == 1


def test_multistep_falls_at_the_milestones_in_epochs():
    factor = warmup_multistep([30, 60, 80], warmup=5, steps_per_epoch=10, start_factor=1 / 32)
    assert factor(0) == 1 / 32
    assert factor(25) == pytest.approx(1 / 32 + 31 / 32 / 2)
    assert [factor(step) for step in (50, 299, 300, 599, 600, 799, 800, 10_000)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_cosine_and_polynomial_from_their_formulas():
    cosine = warmup_cosine(110, 10, end_factor=0.1)
    polynomial = warmup_poly(110, 10, power=2, end_factor=0.1)
    for step in range(10):
        assert cosine(step) == polynomial(step) == pytest.approx(step / 10)
    for step in range(10, 111):
        progress = (step - 10) / 100
        assert cosine(step) == pytest.approx(
            0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2, abs=1e-15
        )
        assert polynomial(step) == pytest.approx(0.1 + 0.9 * (1 - progress) ** 2, abs=1e-15)
    assert cosine(500) == polynomial(500) == pytest.approx(0.1)


def test_mlperf_lars_schedule_in_epochs():
    factor = warmup_poly(total=42, warmup=5, steps_per_epoch=156.25)  # batch 8192
    assert factor(781) < 1
    assert factor(782) == pytest.approx(1, abs=1e-3)
    assert factor(42 * 156 + 11) == 0


@pytest.mark.parametrize(
    "schedule",
    [
        gradual_warmup(7),
        warmup_multistep([9, 20], 7),
        warmup_cosine(30, 7),
        warmup_poly(30, 7, power=1.5),
    ],
    ids=["gradual", "multistep", "cosine", "poly"],
)
def test_schedules_are_pure_continuous_at_the_end_of_warmup_and_picklable(schedule):
    steps = [*range(40), 3, 39, 0]
    values = [schedule(step) for step in steps]
    assert (
        values
        == [schedule(step) for step in steps]
        == [pickle.loads(pickle.dumps(schedule))(s) for s in steps]
    )
    assert schedule(7) == 1
    assert 0.8 < schedule(6) < 1
    assert all(0 <= value <= 1 for value in values)


BAD = {
    "total equal to warm-up": lambda: warmup_cosine(10, 10),
    "milestone within warm-up": lambda: warmup_multistep([5, 30], warmup=10),
    "milestones that fall": lambda: warmup_multistep([30, 20]),
    "no milestones": lambda: warmup_multistep([]),
    "negative warm-up": lambda: gradual_warmup(-1),
    "start above 1": lambda: gradual_warmup(5, start_factor=1.5),
    "NaN": lambda: warmup_cosine(float("nan"), 0),
    "end below 0": lambda: warmup_poly(10, 2, end_factor=-0.1),
    "power 0": lambda: warmup_poly(10, 2, power=0),
    "gamma 0": lambda: warmup_multistep([3], gamma=0),
    "no steps in an epoch": lambda: gradual_warmup(5, steps_per_epoch=0),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match=r"expected|not longer than|within the warm-up"):
        make()
