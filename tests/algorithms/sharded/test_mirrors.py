"""Sharded steps whose ranks die: what survivors compute, and which of them contributes each
shard.
"""

import copy

import pytest
import torch

from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.algorithms.sharded.rebuilding import Standing, holders_of
from lightning_ring.errors import ConfigurationError, StateLostError
from tests.algorithms.sharded.test_sharding import OPTIMIZERS, OTHERS, batches, start
from tests.thread_ranks import run_ranks

BEFORE, AFTER = range(3), range(3, 6)  # steps of three ranks, and of those that are left


class Rank:
    def __init__(self, make, *, mirrors):
        self.net = start()
        self.optimizer = make(self.net.parameters())
        self.algorithm = Sharded(bucket_cap_mb=0.0001)
        self.algorithm.mirrors_shards = mirrors

    def attach(self, comm):
        self.algorithm.attach(self.net, [self.optimizer], comm, warn=pytest.fail)

    def step(self, comm, number, *, complete=True):
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        with self.algorithm.forward():
            loss = self.net(batches(number, comm.world_size)[comm.rank], number)
        with self.algorithm.backward():
            loss.backward()
        self.algorithm.clip_grad_norm_(self.net.precise(), 0.2)
        self.algorithm.before_commit()
        self.optimizer.step()
        if complete:
            self.algorithm.after_commit()

    def end(self):
        state = self.algorithm.of(self.optimizer).state_dict(is_rank_zero=True)
        self.algorithm.detach()
        return state


def fewer_ranks_from_that_state(make, ranks):
    first = [Rank(make, mirrors=False) for _ in range(3)]
    fewer = [Rank(make, mirrors=False) for _ in range(ranks)]

    def before(comm):
        first[comm.rank].attach(comm)
        for number in BEFORE:
            first[comm.rank].step(comm, number)
        return first[comm.rank].end()

    saved = run_ranks(3, before)[0]

    def after(comm):
        rank = fewer[comm.rank]
        rank.net.load_state_dict(first[0].net.state_dict())
        rank.attach(comm)
        rank.algorithm.of(rank.optimizer).load_state_dict(copy.deepcopy(saved))
        for number in AFTER:
            rank.step(comm, number)
        return rank.end()

    states = run_ranks(ranks, after)
    return [rank.net for rank in fewer], states[0]


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], *OTHERS])
def test_survivors_compute_what_fewer_ranks_compute_from_that_state(make):
    """Rank 1 dies when it has stepped its shard, of which the others have not got the parameters
    yet.
    """
    ranks = [Rank(make, mirrors=True) for _ in range(3)]

    def before(comm):
        ranks[comm.rank].attach(comm)
        for number in BEFORE:
            ranks[comm.rank].step(comm, number, complete=number != BEFORE[-1])

    run_ranks(3, before)
    survivors = [ranks[0], ranks[2]]

    def after(comm):
        rank = survivors[comm.rank]
        versions = [param._version for param in rank.net.parameters()]
        rank.algorithm.move(comm)
        rank.algorithm.detach(wait=False)
        # a backward may be under way
        assert versions == [param._version for param in rank.net.parameters()]
        rank.optimizer.zero_grad()
        rank.attach(comm)
        for number in AFTER:
            rank.step(comm, number)
        return rank.end()

    states = run_ranks(2, after)
    nets, expected = fewer_ranks_from_that_state(make, 2)
    for rank in survivors:
        for param, other in zip(rank.net.parameters(), nets[0].parameters(), strict=True):
            assert torch.equal(param, other)
    for state in states:
        for index, values in expected["state"].items():
            for key, value in values.items():
                assert torch.equal(state["state"][index][key], value), (index, key)


def test_a_rank_that_dies_while_others_move():
    """Rank 0 has the whole when rank 1 of the three that are left dies; rank 2 has parts."""
    ranks = [Rank(OPTIMIZERS["sgd"], mirrors=True) for _ in range(3)]

    def before(comm):
        ranks[comm.rank].attach(comm)
        for number in BEFORE:
            ranks[comm.rank].step(comm, number)

    run_ranks(3, before)
    parts = copy.copy(vars(ranks[2].algorithm))
    held = ranks[2].algorithm.of(ranks[2].optimizer).held_state()
    run_ranks(3, lambda comm: ranks[comm.rank].algorithm.move(comm))
    vars(ranks[2].algorithm).update(parts)  # it did not get so far
    ranks[2].algorithm.of(ranks[2].optimizer).replace_state({})
    ranks[2].optimizer.state.update(held)
    assert ranks[2].algorithm._standing().place == 2
    with torch.no_grad():
        for param in ranks[2].net.parameters():
            param.zero_()
    left = [ranks[0], ranks[2]]
    run_ranks(2, lambda comm: left[comm.rank].algorithm.move(comm))
    for one, other in zip(ranks[0].net.parameters(), ranks[2].net.parameters(), strict=True):
        assert torch.equal(one, other)
    first, third = ranks[0].algorithm._moved, ranks[2].algorithm._moved
    assert first is not None
    assert third is not None
    values = [
        [value for state in one[0].values() for value in state.values()] for one in (first, third)
    ]
    assert len(values[0]) == len(values[1]) > 0
    assert all(
        torch.equal(a, b) for a, b in zip(*values, strict=True) if isinstance(a, torch.Tensor)
    )


def test_an_optimizer_that_communicates_in_its_step_is_refused():
    rank = Rank(OPTIMIZERS["lamb"], mirrors=True)
    with pytest.raises(ConfigurationError, match="LAMB takes norms over all ranks"):
        run_ranks(1, rank.attach)


def standings(*places, of):
    return [Standing(place, of) for place in places]


def test_each_shard_comes_from_its_rank_or_from_the_mirror_behind_it():
    assert holders_of(standings(0, 1, 2, of=3)) == [(0, False), (1, False), (2, False)]
    # the ranks at places 1 and 3 of 4 died, and ranks have other numbers now
    assert holders_of(standings(2, 0, of=4)) == [(1, False), (0, True), (0, False), (1, True)]
    assert holders_of(standings(0, of=1)) == [(0, False)]


def test_a_shard_whose_rank_and_mirror_died_is_lost():
    with pytest.raises(StateLostError, match="1 of 4 shards"):
        holders_of(standings(0, 3, of=4))
