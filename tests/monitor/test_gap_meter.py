"""What the gap meter concludes, and what it measures on two real ranks."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ring.monitor import GapMeter
from lightning_ring.monitor.gap_meter import (
    ON_DEVICE,
    ON_HOST,
    REAL,
    REPLAYED,
    RankTimes,
    judge,
    loader_cost,
)
from tests.battery import check_names

MODULE = "tests.checks.gap"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check, timeout=150)


def rank(device=0.1, host=0.1, real=0.1, waits=(0.0,), cost=(0.01, 0.02, 0.005)):
    step = {ON_DEVICE: device, ON_HOST: host, REPLAYED: host, REAL: real}
    return RankTimes(32, cost, step, waits)


def test_the_gap_is_relative_to_synthetic_and_the_slowest_rank_sets_the_speed():
    report = judge([rank(device=0.1, real=0.125), rank(device=0.1, real=0.2)])
    assert report.images_per_second[ON_DEVICE] == pytest.approx(640)
    assert report.images_per_second[REAL] == pytest.approx(320)
    assert report.gap == pytest.approx(0.5)


def test_waiting_is_told_of_the_rank_that_waits_longest():
    waits = tuple(0.01 * step for step in range(100))
    report = judge([rank(waits=(0.1,) * 100), rank(waits=waits)])
    assert report.waiting_rank == 1
    assert report.wait_p50 == pytest.approx(0.5)
    assert report.wait_p95 == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(real=0.104)], "none"),
        ([rank(real=0.2, cost=(0.3, 0.2, 0.1))], "reading"),
        ([rank(real=0.2, cost=(0.1, 0.3, 0.2))], "decoding and transforms"),
        ([rank(real=0.2, cost=(0.1, 0.2, 0.3))], "handing over"),
        ([rank(host=0.16, real=0.2, cost=(0.1, 0.2, 0.3))], "copying to the device"),
        ([rank(host=0.14, real=0.2, cost=(0.3, 0.2, 0.1))], "reading"),
    ],
)
def test_one_bottleneck_is_named(ranks, expected):
    report = judge(ranks)
    assert report.bottleneck == expected
    assert expected == "none" or f"bottleneck: {expected}" in report.table()


@pytest.mark.parametrize(("steps", "rounds"), [(3, 1), (4, 0)])
def test_too_few_steps_are_an_error(steps, rounds):
    with pytest.raises(ValueError, match="steps >= 4 and rounds >= 1"):
        GapMeter(steps=steps, rounds=rounds)


class Stream(IterableDataset):
    """As webdataset's with a length: `Dataset.__getitem__` is there, and raises."""

    def __len__(self):
        return 8

    def __iter__(self):
        yield from torch.arange(8.0)


class Batched(Dataset):
    """Gives whole batches for indices that its sampler knows."""

    def __len__(self):
        return 2

    def __getitem__(self, rows):
        assert isinstance(rows, list)
        return torch.tensor(rows)


def test_loaders_whose_samples_cannot_be_had_one_by_one_are_judged_by_the_time_of_a_batch():
    batched = DataLoader(Batched(), batch_size=None, sampler=[[0, 1], [2, 3]])
    for loader in (DataLoader(Stream(), 4), batched):
        assert len(list(loader)) == 2
        assert loader_cost(loader, 4, 0.25) == (0.0, 0.0, 0.25)
