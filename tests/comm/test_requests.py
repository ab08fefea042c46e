"""Questions between ranks that are threads: lengths, order, errors, and the end."""

import time
from collections import defaultdict

import pytest
import torch

from lightning_ring.comm import requests
from lightning_ring.errors import CollectiveError
from tests.thread_ranks import ThreadTransport, run_ranks

LENGTHS = (0, 1, 99, 100, 101, 250)


def numbered(length, asking, asked):
    return (torch.arange(length) + 10 * asking + asked).to(torch.uint8)


def opened(comm, answer):
    found = comm.open_requests(answer)
    found.start()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_asks_all_at_once_and_gets_the_answers_in_order(world_size, monkeypatch):
    monkeypatch.setattr(requests, "_PIECE_BYTES", 100)

    def rank(comm):
        asked = {peer: [] for peer in range(world_size)}

        def answer(peer, question):
            assert torch.equal(question, numbered(question.numel(), peer, comm.rank))
            asked[peer].append(question.numel())
            return torch.cat([question, question.flip(0)])

        open_requests = opened(comm, answer)
        for length in LENGTHS:
            questions = {peer: numbered(length, comm.rank, peer) for peer in range(world_size)}
            asked_for = dict.fromkeys(questions, 2 * length)
            answers = open_requests.ask(questions, f"{length} bytes", asked_for)
            assert {peer: found.tolist() for peer, found in answers.items()} == {
                peer: [*question.tolist(), *question.flip(0).tolist()]
                for peer, question in questions.items()
            }
        comm.barrier()
        assert asked == {peer: list(LENGTHS) for peer in range(world_size)}
        open_requests.close()
        open_requests.close()
        with pytest.raises(CollectiveError, match="answers no more"):
            open_requests.ask({}, "late", {})

    run_ranks(world_size, rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_two_ranks_ask_each_other_shares_no_connection(world_size, monkeypatch):
    """Over a shared one Gloo sends a long message only when the other rank's own long message
    has passed.
    """
    sent = defaultdict(set)
    isend = ThreadTransport.isend

    def recorded(self, tensor, dst, tag=0):
        if tensor.nbytes in (3000, 5000):
            sent[self.connection, self.rank, dst].add(tensor.nbytes)
        return isend(self, tensor, dst, tag)

    def rank(comm):
        open_requests = opened(comm, lambda peer, question: torch.zeros(5000, dtype=torch.uint8))
        questions = {peer: torch.zeros(3000, dtype=torch.uint8) for peer in range(world_size)}
        open_requests.ask(questions, "question", dict.fromkeys(questions, 5000))
        open_requests.close()

    monkeypatch.setattr(ThreadTransport, "isend", recorded)
    run_ranks(world_size, rank)
    ways = world_size * (world_size - 1)
    assert sorted(map(list, sent.values())) == [[3000]] * ways + [[5000]] * ways


@pytest.mark.parametrize("name", ["_receive", "_send", "_answer"])
def test_a_thread_that_cannot_answer_any_more_breaks_its_rank(name, monkeypatch):
    """Else the other one would wait for the timeout."""

    def fails(*_, **__):
        raise MemoryError("no memory")

    def rank(comm):
        open_requests = opened(comm, lambda peer, question: question)
        if comm.rank == 0:
            while True:
                open_requests.ask({1: torch.zeros(1000, dtype=torch.uint8)}, "question", {1: 1000})
        monkeypatch.setattr(open_requests, name, fails)
        until = time.monotonic() + 50
        while time.monotonic() < until:
            open_requests.check()

    with pytest.raises(CollectiveError, match="answers for rank 0 failed: MemoryError: no memory"):
        run_ranks(2, rank)
