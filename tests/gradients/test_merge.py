"""The merge against every way there is to cut."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from lightning_ring.comm.cost import CostModel
from lightning_ring.gradients.layout import Seconds, merge


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


@pytest.mark.parametrize("num", [0, 1])
def test_nothing_to_cut(num: int) -> None:
    assert merge([1.0] * num, [0.0] * num, link(1e-4, 1e8)) == [1] * num


def last_arrival(
    ends: list[int], sizes: list[float], ready: list[float], seconds: Seconds
) -> float:
    """When the last of the buckets that end at ``ends`` (as `merge` returns them) has arrived."""
    arrived, start = 0.0, 0
    for stop in ends:
        arrived = max(arrived, *ready[start:stop]) + seconds(sum(sizes[start:stop]))
        start = stop
    return arrived
