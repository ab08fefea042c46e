"""Questions between ranks that are threads: lengths, order, errors, and the end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ring.comm import requests
from lightning_ring.comm.requests import Answer, Requests
from lightning_ring.errors import CollectiveError
from tests.thread_ranks import ThreadCommunicator, run_ranks

LENGTHS = (0, 1, 99, 100, 101, 250)


def numbered(length: int, asking: int, asked: int) -> Tensor:
    return (torch.arange(length) + 10 * asking + asked).to(torch.uint8)


def opened(comm: ThreadCommunicator, answer: Answer) -> Requests:
    found = comm.open_requests(answer)
    found.start()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_asks_all_at_once_and_gets_the_answers_in_order(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_PIECE_BYTES", 100)

    def rank(comm: ThreadCommunicator) -> None:
        asked: dict[int, list[int]] = {peer: [] for peer in range(world_size)}

        def answer(peer: int, question: Tensor) -> Tensor:
            assert torch.equal(question, numbered(question.numel(), peer, comm.rank))
            asked[peer].append(question.numel())
            return torch.cat([question, question.flip(0)])

        open_requests = opened(comm, answer)
        for length in LENGTHS:
            questions = {peer: numbered(length, comm.rank, peer) for peer in range(world_size)}
            answers = open_requests.ask(questions, f"{length} bytes").wait()
            assert {peer: found.tolist() for peer, found in answers.items()} == {
                peer: [*question.tolist(), *question.flip(0).tolist()] for peer, question in questions.items()
            }
        comm.barrier()
        assert asked == {peer: list(LENGTHS) for peer in range(world_size)}
        open_requests.close()
        open_requests.close()
        with pytest.raises(CollectiveError, match="answers no more"):
            open_requests.ask({}, "late")

    run_ranks(world_size, rank)


def test_what_an_answer_raises_is_told_where_it_was_asked_and_ends_nothing() -> None:
    def rank(comm: ThreadCommunicator) -> None:
        def answer(peer: int, question: Tensor) -> Tensor:
            if question.item() == 1:
                raise ValueError("one is too much")
            return question

        open_requests = opened(comm, answer)
        for peer in range(2):
            with pytest.raises(CollectiveError, match=f"rank {peer} answers: ValueError: one is too much"):
                open_requests.ask({peer: torch.ones(1, dtype=torch.uint8)}, "one").wait()
            zero = torch.zeros(1, dtype=torch.uint8)
            assert torch.equal(open_requests.ask({peer: zero}, "zero").wait()[peer], zero)
        open_requests.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("name", ["_receive", "_send"])
def test_a_thread_that_cannot_answer_any_more_breaks_its_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other one would wait for the timeout."""

    def fails(*_: Any) -> Any:
        raise MemoryError("no memory")

    def rank(comm: ThreadCommunicator) -> None:
        open_requests = opened(comm, lambda peer, question: question)
        if comm.rank == 0:
            while True:
                open_requests.ask({1: torch.zeros(1000, dtype=torch.uint8)}, "question").wait()
        monkeypatch.setattr(open_requests, name, fails)
        until = time.monotonic() + 50
        while time.monotonic() < until:
            open_requests.check()

    with pytest.raises(CollectiveError, match="answers for rank 0 failed: MemoryError: no memory"):
        run_ranks(2, rank)
