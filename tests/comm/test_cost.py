"""The α–β model: what it predicts, and that its fit finds the link behind noisy times."""

import math
import random

import pytest

from lightning_ring.comm.cost import CostModel, fit
from lightning_ring.errors import ConfigurationError

LINK = CostModel(alpha_seconds=50e-6, bandwidth=125e6)
SIZES = [2**power for power in range(10, 29, 2)]


def test_the_formula_of_the_ring():
    assert LINK.seconds(100e6, 4) == pytest.approx(2 * 3 * (50e-6 + 100e6 / (4 * 125e6)))
    assert LINK.seconds(100e6, 4, "reduce_scatter") == pytest.approx(LINK.seconds(100e6, 4) / 2)
    assert LINK.seconds(100e6, 4, "all_gather") == pytest.approx(LINK.seconds(100e6, 4) / 2)
    assert LINK.seconds(100e6, 1) == 0


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_exact_times_give_the_link_back(world_size, collective):
    times = [LINK.seconds(size, world_size, collective) for size in SIZES]
    model = fit(SIZES, times, world_size, collective=collective)
    assert model.alpha_seconds == pytest.approx(50e-6, rel=1e-6)
    assert model.bandwidth == pytest.approx(125e6, rel=1e-6)


def test_noise_and_outliers_hardly_move_the_fit():
    noise = random.Random(0)
    sizes, times = [], []
    for size in SIZES:
        for repeat in range(7):
            disturbed = 20.0 if repeat < 2 else 1.0  # two of seven were held up by something else
            sizes.append(size)
            times.append(LINK.seconds(size, 2) * noise.uniform(0.95, 1.10) * disturbed)
    # and one size all the time
    times[SIZES.index(2**16) * 7 : SIZES.index(2**16) * 7 + 7] = [0.5] * 7
    model = fit(sizes, times, 2)
    assert model.alpha_seconds == pytest.approx(50e-6, rel=0.2)
    assert model.bandwidth == pytest.approx(125e6, rel=0.1)


def test_neither_part_is_ever_negative():
    flat = fit([1e3, 1e4, 1e5], [3e-4, 2e-4, 1e-4], 2)
    assert flat.alpha_seconds > 0
    assert flat.bandwidth == math.inf
    steep = fit([1e6, 2e6], [0.001, 0.003], 2)
    assert steep.alpha_seconds == 0
    assert 0 < steep.bandwidth < math.inf


@pytest.mark.parametrize(
    ("sizes", "times", "world_size", "expected"),
    [
        ([1e6, 1e6], [0.1, 0.2], 2, "1 different size"),
        ([], [], 2, "0 different size"),
        ([1e3, 1e6], [0.1, 0.2], 1, "1 rank"),
        ([1e3, 1e6], [0.1, 0.0], 2, "no measurement"),
        ([1e3, 1e6], [0.1, math.nan], 2, "no measurement"),
    ],
)
def test_what_cannot_be_fitted_says_why(sizes, times, world_size, expected):
    with pytest.raises(ConfigurationError, match=expected):
        fit(sizes, times, world_size)
