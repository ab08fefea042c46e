"""Ranks that let others in between two steps: each keeps its parts, and all compute what so many
ranks compute.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ring.algorithms.sharded import Sharded, letting_in
from lightning_ring.algorithms.sharded.inventory import Inventory, Span
from lightning_ring.algorithms.sharded.letting_in import LettingIn
from lightning_ring.algorithms.sharded.rebuilding import Standing, only_newcomers
from lightning_ring.comm.communicator import Communicator
from tests.algorithms.sharded.test_mirrors import AFTER, BEFORE, Rank
from tests.algorithms.sharded.test_sharding import OPTIMIZERS, OTHERS, Make, Net
from tests.thread_ranks import ThreadCommunicator, run_ranks


def trained(make: Make, count: int) -> list[Rank]:
    """Ranks that have stepped."""
    ranks = [Rank(make, mirrors=True) for _ in range(count)]

    def before(comm: ThreadCommunicator) -> None:
        ranks[comm.rank].attach(comm)
        for number in BEFORE:
            ranks[comm.rank].step(comm, number)

    run_ranks(count, before)
    return ranks


def newcomer(make: Make) -> Rank:
    rank = Rank(make, mirrors=True)
    with torch.no_grad():
        for param in rank.net.parameters():
            param.fill_(7)
    return rank


def join(
    rank: Rank, comm: Communicator, *, has_state: bool, held: Inventory | None = None
) -> tuple[int, int] | None:
    rank.algorithm.move(comm, has_state=has_state)
    rank.algorithm.detach(wait=False)
    rank.optimizer.zero_grad()
    rank.attach(comm)
    return rank.algorithm.let_in(held, receives=not has_state, compares=held is not None)


def go_on(rank: Rank, comm: Communicator) -> dict[str, Any]:
    for number in AFTER:
        rank.step(comm, number)
    return rank.end()


def as_many_ranks_from_that_state(
    make: Make, before: int, after: int, *, joined: bool = True
) -> tuple[Net, dict[str, Any]]:
    """By a checkpoint between. Sums have the same order as behind a join, whose buckets are
    known from the begin.
    """
    first = [Rank(make, mirrors=False) for _ in range(before)]
    second = [Rank(make, mirrors=False) for _ in range(after)]

    def train(comm: ThreadCommunicator) -> dict[str, Any]:
        first[comm.rank].attach(comm)
        for number in BEFORE:
            first[comm.rank].step(comm, number)
        order.update(
            {n: None for bucket in first[comm.rank].algorithm.reducer.buckets for n in bucket.names}
        )
        return first[comm.rank].end()

    order: dict[str, None] = {}
    saved = run_ranks(before, train)[0]

    def train_on(comm: ThreadCommunicator) -> dict[str, Any]:
        rank = second[comm.rank]
        rank.net.load_state_dict(first[0].net.state_dict())
        rank.algorithm._joins, rank.algorithm._averaging.first_order = (
            joined,
            list(order) if joined else (),
        )
        rank.attach(comm)
        rank.algorithm.of(rank.optimizer).load_state_dict(copy.deepcopy(saved))
        return go_on(rank, comm)

    state = run_ranks(after, train_on)[0]
    return second[0].net, state


def assert_same_bits(
    ranks: list[Rank], states: list[dict[str, Any]], net: Net, expected: dict[str, Any]
) -> None:
    for rank in ranks:
        for param, other in zip(rank.net.parameters(), net.parameters(), strict=True):
            assert torch.equal(param, other)
    for state in states:
        assert state["state"].keys() == expected["state"].keys()
        for index, values in expected["state"].items():
            for key, value in values.items():
                assert torch.equal(
                    torch.as_tensor(state["state"][index][key]), torch.as_tensor(value)
                ), (index, key)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    # a checkpoint would bring mu_product of NAdam to float64
    [(make, 2, 3) for make in (OPTIMIZERS["sgd"], *OTHERS) if make is not torch.optim.NAdam]
    + [(torch.optim.AdamW, before, after) for before, after in ((1, 2), (3, 4), (2, 5), (4, 5))],
)
def test_ranks_compute_what_so_many_ranks_compute_from_that_state(
    make: Make, before: int, after: int
) -> None:
    ranks = [*trained(make, before), *(newcomer(make) for _ in range(after - before))]

    def train_on(comm: ThreadCommunicator) -> tuple[tuple[int, int] | None, dict[str, Any]]:
        counted = join(ranks[comm.rank], comm, has_state=comm.rank < before)
        return counted, go_on(ranks[comm.rank], comm)

    results = run_ranks(after, train_on)
    (sent, of) = results[0][0] or (0, 1)
    assert sent == of > 0  # newcomers had nothing
    net, expected = as_many_ranks_from_that_state(make, before, after)
    assert_same_bits(ranks, [state for _, state in results], net, expected)


def all_parts_of(ranks: list[Rank]) -> Inventory:
    """What a newcomer has got that has caught up."""
    held = Inventory()
    for rank in ranks:
        numbers = {param: index for index, param in enumerate(rank.net.parameters())}
        before = rank.algorithm._shards_before()
        for span in before.own(numbers):
            held.add(span, before.inventory(numbers).cut(span))
    return held


def test_what_a_newcomer_has_got_is_not_sent_again() -> None:
    """It has all, but for the state of one part, and one weight."""
    make = torch.optim.AdamW
    ranks = trained(make, 3)
    held = all_parts_of(ranks)
    new = newcomer(make)
    new.net.load_state_dict(ranks[0].net.state_dict())
    spans = sorted(span for parts in held._parts.values() for span in parts if span.numel > 1)
    wrong = held.get(spans[0])
    assert wrong is not None
    assert wrong[0] is not None
    wrong[0]["exp_avg"][0] += 1
    with torch.no_grad():
        new.net.single.bias[1] += 1
    ranks.append(new)

    def train_on(comm: ThreadCommunicator) -> tuple[tuple[int, int] | None, dict[str, Any]]:
        rank, has_state = ranks[comm.rank], comm.rank < 3
        rank.algorithm.move(comm, has_state=has_state)
        rank.algorithm.detach(wait=False)
        rank.optimizer.zero_grad()
        rank.attach(comm)
        counted = rank.algorithm.let_in(
            None if has_state else held, receives=not has_state, compares=True
        )
        return counted, go_on(rank, comm)

    results = run_ranks(4, train_on)
    sent, of = results[0][0] or (0, 0)
    assert 0 < sent < of / 2
    net, expected = as_many_ranks_from_that_state(make, 3, 4)
    assert_same_bits(ranks, [state for _, state in results], net, expected)


def test_ranks_and_newcomers_make_their_digests_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes over all of the state, while all others wait for the join."""
    together, begun = threading.Barrier(2), threading.local()
    plain = letting_in.digests_of

    def digests_of(tensors: Sequence[Tensor]) -> list[str]:
        if not hasattr(begun, "here"):
            begun.here = together.wait(30)
        return plain(tensors)

    make = torch.optim.AdamW
    ranks = trained(make, 1)
    held, new = all_parts_of(ranks), newcomer(make)
    new.net.load_state_dict(ranks[0].net.state_dict())
    ranks.append(new)
    monkeypatch.setattr(letting_in, "digests_of", digests_of)

    def let_in(comm: ThreadCommunicator) -> tuple[int, int] | None:
        rank, has_state = ranks[comm.rank], comm.rank == 0
        rank.algorithm.move(comm, has_state=has_state)
        rank.algorithm.detach(wait=False)
        rank.attach(comm)
        return rank.algorithm.let_in(
            None if has_state else held, receives=not has_state, compares=True
        )

    (sent, of) = run_ranks(2, let_in)[0] or (1, 0)
    assert sent == 0 < of


@pytest.mark.parametrize(("make", "states"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)])
@pytest.mark.parametrize("count", [2, 4])
def test_a_newcomer_takes_the_memory_that_the_algorithm_says(
    make: Make, states: int, count: int
) -> None:
    def rank() -> Rank:
        one = Rank(make, mirrors=True)
        one.net = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(5)))  # type: ignore[assignment]
        one.optimizer = make(one.net.parameters())
        return one

    ranks = [rank() for _ in range(count)]

    def begin(comm: ThreadCommunicator) -> None:
        one = ranks[comm.rank]
        one.attach(comm)
        with one.algorithm.backward():
            one.net(torch.ones(1, 200)).sum().backward()
        one.algorithm.before_commit()
        one.optimizer.step()
        one.algorithm.after_commit()

    run_ranks(count - 1, begin)

    def taken(comm: ThreadCommunicator) -> int:
        one = ranks[comm.rank]
        join(one, comm, has_state=comm.rank < count - 1)
        parameters, mirrors, reducer = (
            one.algorithm._attached,
            one.algorithm._mirrors,
            one.algorithm.reducer,
        )
        assert mirrors is not None
        assert reducer is not None
        state = one.algorithm.of(one.optimizer).state_of_parts()
        tensors = [bucket.flat for bucket in (*reducer.buckets, *parameters.buckets)]
        mirrored = [shard.weight.detach() for shard in mirrors.by_param.values()]
        tensors += 3 * mirrored  # two are gradients of the step: they are sent and received
        tensors += [value for values in state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in tensors)

    found = run_ranks(count, taken)[-1]
    size = 5 * 200 * 200 * 4
    assert Sharded().memory_to_join(size, states * size, count) == pytest.approx(found, rel=0.02)


def test_large_states_travel_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letting_in, "ROUND_BYTES", 100)
    test_ranks_compute_what_so_many_ranks_compute_from_that_state(torch.optim.Adam, 3, 4)


@pytest.mark.parametrize("dead", [3, 1], ids=["the newcomer", "a rank"])
def test_a_death_between_the_join_and_the_next_step_loses_nothing(dead: int) -> None:
    """The others have three places then, or what the newcomer holds."""
    make = torch.optim.AdamW
    ranks = [*trained(make, 3), newcomer(make)]
    run_ranks(4, lambda comm: join(ranks[comm.rank], comm, has_state=comm.rank < 3))
    assert [rank.algorithm._standing(True).place for rank in ranks] == [0, 1, 2, -1]
    left = [rank for number, rank in enumerate(ranks) if number != dead]

    def train_on(comm: ThreadCommunicator) -> dict[str, Any]:
        rank = left[comm.rank]
        rank.algorithm.move(comm, has_state=True)
        rank.algorithm.detach(wait=False)
        rank.optimizer.zero_grad()
        rank.attach(comm)
        assert rank.algorithm.let_in(None, receives=False, compares=False) is None
        return go_on(rank, comm)

    states = run_ranks(3, train_on)
    net, expected = as_many_ranks_from_that_state(make, 3, 3, joined=False)
    assert_same_bits(left, states, net, expected)


@pytest.mark.parametrize("dies", [False, True], ids=["both come again", "a rank has died"])
def test_a_join_that_was_broken_off_is_done_again(dies: bool) -> None:
    """Rank 2 and the newcomer have not got so far as ranks 0 and 1. Another newcomer comes, too."""
    make = torch.optim.AdamW
    ranks = [*trained(make, 3), newcomer(make)]
    parts = copy.copy(vars(ranks[2].algorithm))
    state = dict(ranks[2].algorithm.of(ranks[2].optimizer).held_state())
    parameters = [param.detach().clone() for param in ranks[2].net.parameters()]
    run_ranks(4, lambda comm: ranks[comm.rank].algorithm.move(comm, has_state=comm.rank < 3))
    vars(ranks[2].algorithm).update(parts)
    ranks[2].algorithm.of(ranks[2].optimizer).replace_state({})
    ranks[2].optimizer.state.update(state)
    for rank in ranks[:2]:
        rank.algorithm.detach(wait=False)
    assert all(
        torch.equal(*pair) for pair in zip(parameters, ranks[2].net.parameters(), strict=True)
    )
    present = [ranks[0], ranks[2], ranks[3], newcomer(make)] if dies else [*ranks, newcomer(make)]
    count = 2 if dies else 3

    def train_on(comm: ThreadCommunicator) -> dict[str, Any]:
        rank, has_state = present[comm.rank], comm.rank < count
        counted = join(rank, comm, has_state=has_state)
        assert (counted is None) == dies
        if dies:
            module, source = rank.net, present[0]
            with torch.no_grad():
                for param, other in zip(module.parameters(), source.net.parameters(), strict=True):
                    param.copy_(other)
            whole = rank.algorithm.optimizer_state_dict(rank.optimizer, is_rank_zero=comm.rank == 0)
            whole = comm.broadcast_object(whole)
            if not has_state:
                rank.algorithm.load_optimizer_state_dict(rank.optimizer, whole)
        return go_on(rank, comm)

    states = run_ranks(len(present), train_on)
    net, expected = as_many_ranks_from_that_state(make, 3, len(present), joined=not dies)
    assert_same_bits(present, states, net, expected)


def test_a_checkpoint_before_the_next_step_is_whole() -> None:
    make = torch.optim.AdamW
    ranks = [*trained(make, 3), newcomer(make)]

    def save(comm: ThreadCommunicator) -> dict[str, Any]:
        join(ranks[comm.rank], comm, has_state=comm.rank < 3)
        return ranks[comm.rank].end()

    states = run_ranks(4, save)
    other = trained(make, 3)
    saved = run_ranks(3, lambda comm: _saved(other[comm.rank], comm))[0]
    assert_same_bits(ranks, states, other[0].net, saved)


def _saved(rank: Rank, comm: Communicator) -> dict[str, Any]:
    rank.algorithm.move(comm, has_state=True)
    rank.algorithm.detach(wait=False)
    rank.attach(comm)
    return rank.end()


def test_only_what_a_rank_lacks_is_missing() -> None:
    held = Inventory()
    values = torch.arange(10.0)

    def state(first: int, stop: int) -> list[dict[str, Any] | None]:
        return [{"sum": values[first:stop].clone(), "step": torch.tensor(3.0)}, None]

    held.add(Span(0, 2, 3), state(2, 5))
    held.add(Span(0, 7, 2), state(7, 9))
    assert held.missing(Span(0, 0, 10)) == [Span(0, 0, 2), Span(0, 5, 2), Span(0, 9, 1)]
    assert held.missing(Span(0, 3, 2)) == held.missing(Span(0, 4, 0)) == []
    assert held.missing(Span(1, 0, 2)) == [Span(1, 0, 2)]
    held.add(Span(0, 5, 2), state(5, 7))
    cut = held.cut(Span(0, 3, 5))
    assert cut[1] is None
    assert cut[0] is not None
    assert cut[0]["sum"].tolist() == [3, 4, 5, 6, 7]
    cut[0]["step"] += 1
    (empty, _) = held.cut(Span(0, 9, 0))
    assert empty is not None
    assert empty["sum"].shape == (0,)
    assert empty["step"] == 3


def test_newcomers_alone_are_let_in_without_the_whole_state() -> None:
    both, new = [Standing(0, 2), Standing(1, 2)], Standing()
    assert only_newcomers([*both, new])
    assert only_newcomers([Standing(0, 1), new, new])
    assert not only_newcomers(both)
    assert not only_newcomers([both[0], new])  # one has died
    assert not only_newcomers([Standing(-1), new])
    assert not only_newcomers([*both, Standing(-1), new])
    assert not only_newcomers([Standing(0, 2, settled=False), both[1], new])
    assert not only_newcomers([new, new])


@pytest.mark.parametrize("caught_up", [False, True])
def test_parts_that_were_cut_for_other_ranks_are_of_no_use_to_a_newcomer(caught_up: bool) -> None:
    """They came before a death, behind which it may have caught up once more."""
    values = torch.arange(5.0, 15.0)

    def exchange(comm: ThreadCommunicator) -> Inventory:
        held, whole, memory = Inventory(), Span(0, 5, 10), torch.ones(20)
        state = {"sum": values.clone(), "step": torch.tensor(3.0)}
        if comm.rank == 1:
            for first, numel in ((5, 4), (9, 4), (13, 2)):
                held.add(
                    Span(0, first, numel), [{"sum": torch.zeros(numel), "step": torch.tensor(2.0)}]
                )
        if comm.rank == 0 or caught_up:
            held.add(whole, [state])
        one = LettingIn(
            comm,
            held,
            lambda span: memory[span.first : span.end],
            memory.device,
            receives=comm.rank == 1,
        )
        one.run([whole] if comm.rank == 0 else [], [whole], compares=True)
        assert (one.sent == 0) == caught_up
        return held

    (state,) = run_ranks(2, exchange)[1].cut(Span(0, 9, 3))
    assert state is not None
    assert torch.equal(state["sum"], values[4:7])
    assert state["step"] == 3


def test_a_rank_gets_the_middle_of_a_part_of_another_one() -> None:
    def exchange(comm: ThreadCommunicator) -> Inventory:
        held, whole = Inventory(), Span(0, 5, 10)
        if comm.rank == 0:
            held.add(whole, [{"sum": torch.arange(5.0, 15.0), "step": torch.tensor(3.0)}])
        memory = torch.zeros(20)
        one = LettingIn(
            comm, held, lambda span: memory[span.first : span.end], memory.device, receives=False
        )
        one.run([whole] if comm.rank == 0 else [], [Span(0, 9, 3)], compares=False)
        return held

    (state,) = run_ranks(2, exchange)[1].cut(Span(0, 9, 3))
    assert state is not None
    assert state["sum"].tolist() == [9, 10, 11]
    assert state["step"] == 3
