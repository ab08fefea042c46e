"""What is chosen from planted times, on thread-ranks; `tests/checks/gradients` has it on real
ranks and times.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.comm.cost import CostModel
from lightning_ring.comm.recording import CollectiveRecord, RecordedCommunicator
from lightning_ring.gradients import layout
from lightning_ring.gradients.layout import AutoBuckets
from tests.thread_ranks import run_ranks

CPU = torch.device("cpu")
READY = [0.1, 0.2, 0.3, 0.4]  # of four gradients of 1 MiB


def choose(
    monkeypatch: pytest.MonkeyPatch, link: CostModel, late: float, halves: bool = False
) -> list[tuple[list[list[str]], str]]:
    """Buckets and words of two ranks; gradient ``p0`` is there after ``late`` seconds on the
    second one.
    """
    clock = threading.local()
    monkeypatch.setattr(layout, "now", lambda device: clock.now)
    monkeypatch.setattr(AutoBuckets, "_probe", lambda self, dtype, device: link)

    def rank(comm):
        said: list[str] = []
        auto = AutoBuckets(comm, said.append, halves=halves)
        for noise in (0.0, 0.01, 5.0):  # the median counts
            clock.now = 7.0
            auto.begin_backward(CPU)
            for index, seconds in enumerate(READY):
                clock.now = 7.0 + noise + (late if index == 0 and comm.rank == 1 else seconds)
                auto.note(f"p{index}", CPU)
        buckets = auto.build(
            [(f"p{index}", Parameter(torch.zeros(2**18))) for index in (3, 2, 1, 0)]
        )
        return [bucket.names for bucket in buckets], said[0]

    return run_ranks(2, rank)


def test_order_and_cuts_follow_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    results = choose(monkeypatch, CostModel(1e-3, 1e9), late=0.5)
    assert results[0] == results[1]
    assert results[0][0] == [["p1", "p2", "p3"], ["p0"]]


def test_words_say_what_was_chosen_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = CostModel(1e-3, 2**20 / 0.2)  # an all-reduce of 1 MiB over two ranks: 0.202 s
    (names, words), _ = choose(monkeypatch, slow, late=0.1)
    # there at 0.31, 0.41 of a wire that is free at 0.514
    assert names == [["p0"], ["p1"], ["p2", "p3"]]
    assert "chose 3 bucket(s) of 1, 1, 2 MiB" in words
    assert "costs 1000 µs and moves 5 MB/s" in words


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_sent_is_what_is_timed(halves: bool) -> None:
    def rank(comm) -> set[str]:
        recorded: list[CollectiveRecord] = []
        auto = AutoBuckets(
            RecordedCommunicator(comm, [recorded.append]), lambda _: None, halves=halves
        )
        auto._probe(torch.float32, CPU)
        return {one.kind for one in recorded}

    assert run_ranks(2, rank) == [{"reduce_scatter" if halves else "all_reduce"}] * 2
