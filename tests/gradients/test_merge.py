"""The merge against every way there is to cut, and against MG-WFBP's own algorithm."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from lightning_ring.comm.cost import CostModel
from lightning_ring.gradients.layout import Seconds, last_arrival, merge


def link(alpha: float, bandwidth: float) -> Seconds:
    model = CostModel(alpha, bandwidth)
    return lambda num_bytes: model.seconds(num_bytes, 2)


def backward(seed: int, num: int, spread: float) -> tuple[list[float], list[float]]:
    """Sizes from a bias to a large layer, and the moments at which they are there."""
    numbers = random.Random(seed)
    ready, now = [], 0.0
    for _ in range(num):
        now += numbers.expovariate(1.0) * spread
        ready.append(now)
    return [10 ** numbers.uniform(2, 7) for _ in range(num)], ready


def every_cut(num: int) -> list[list[int]]:
    inner = range(1, num)
    return [[*cuts, num] for count in range(num) for cuts in combinations(inner, count)]


def mg_wfbp(sizes: list[float], ready: list[float], seconds: Seconds) -> list[int]:
    """Algorithm 1 of the paper, forward: hold a bucket back for the next gradient if that is there
    before the bucket could leave, or so soon after that waiting costs less than one more message's
    start-up."""
    ends: list[int] = []
    arrived, first = 0.0, 0
    for index in range(len(sizes)):
        leaves = max(arrived, ready[index])
        if index + 1 < len(sizes) and ready[index + 1] < leaves + seconds(0):
            continue
        arrived = leaves + seconds(sum(sizes[first : index + 1]))
        ends.append(index + 1)
        first = index + 1
    return ends


LINKS = [(1e-5, 1e10), (1e-4, 125e6), (5e-3, 125e6), (1e-3, 1e7), (0.0, 1e8)]


@pytest.mark.parametrize(("alpha", "bandwidth"), LINKS)
@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-2])
def test_no_way_to_cut_ends_earlier(alpha: float, bandwidth: float, spread: float) -> None:
    seconds = link(alpha, bandwidth)
    for seed in range(2):
        sizes, ready = backward(seed, 8, spread)
        ends = merge(sizes, ready, seconds)
        earliest = min(last_arrival(cut, sizes, ready, seconds) for cut in every_cut(len(sizes)))
        assert last_arrival(ends, sizes, ready, seconds) == pytest.approx(earliest, rel=1e-8)


@pytest.mark.parametrize(("alpha", "bandwidth"), LINKS)
def test_never_later_than_mg_wfbp_one_bucket_or_one_each(alpha: float, bandwidth: float) -> None:
    seconds = link(alpha, bandwidth)
    for seed in range(3):
        sizes, ready = backward(seed, 160, 1e-3)
        ours = last_arrival(merge(sizes, ready, seconds), sizes, ready, seconds)
        for other in (mg_wfbp(sizes, ready, seconds), [160], list(range(1, 161))):
            assert ours <= last_arrival(other, sizes, ready, seconds) * (1 + 1e-8)


def test_gradients_that_come_at_once_travel_as_one() -> None:
    assert merge([1e6] * 8, [0.01] * 8, link(1e-4, 1e9)) == [8]


def test_a_wire_that_is_behind_never_waits() -> None:
    """0.1 s a gradient on the wire and none for a start: whatever is held back arrives later."""
    assert merge([1e7] * 4, [0.1, 0.15, 0.2, 0.25], link(0.0, 1e8)) == [1, 2, 4]


def test_a_fast_wire_gets_few_buckets_and_a_short_last_one() -> None:
    ends = merge([1e6] * 10, [0.1 * i for i in range(1, 11)], link(1e-5, 1e10))
    assert len(ends) == 2
    assert ends[0] == 9


def test_a_slow_start_makes_for_fewer_buckets() -> None:
    sizes, ready = backward(1, 60, 1e-3)
    counts = [len(merge(sizes, ready, link(alpha, 125e6))) for alpha in (0.0, 1e-3, 1e-1)]
    assert counts[0] > counts[1] > counts[2] == 1


@pytest.mark.parametrize("num", [0, 1])
def test_nothing_to_cut(num: int) -> None:
    assert merge([1.0] * num, [0.0] * num, link(1e-4, 1e8)) == [1] * num
