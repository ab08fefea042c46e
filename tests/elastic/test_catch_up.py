"""A module that gets another one's state and follows its steps ends with the same bits; nothing
else waits for it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.holdings import whole_state
from lightning_ring.elastic.catch_up import pace
from lightning_ring.elastic.catch_up import source as sources
from lightning_ring.elastic.catch_up.source import Source
from lightning_ring.elastic.catch_up.stream import StateStream
from lightning_ring.elastic.catch_up.wire import Message, receive
from lightning_ring.optim import LAMB, LARS
from tests.algorithms.sharded.test_mirrors import Rank as ShardedRank
from tests.thread_ranks import run_ranks

WAIT = 60.0


class Net(nn.Module):
    """Parameters of every kind: frozen, tied, 0-d, in another order of memory, in bfloat16,
    empty.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(5, 4, generator=g)) for _ in range(6)
        )
        self.strided = nn.Parameter(
            torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last)
        )
        self.frozen = nn.Parameter(torch.randn(7, generator=g), requires_grad=False)
        self.scale = nn.Parameter(torch.randn((), generator=g))
        self.rounded = nn.Parameter(torch.randn(9, generator=g).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.late = nn.Parameter(torch.randn(4, generator=g))  # has no gradient in the first steps
        self.tied = self.scale


Build = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adamw of a tensor": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), foreach=False, capturable=False
    ),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "lars": lambda params: LARS(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "lamb": lambda params: LAMB(params, lr=0.01, weight_decay=0.01),
}


class Rank:
    """Trains by itself, as one of ranks with equal averages, and sends its state."""

    def __init__(self, build: Build, module: nn.Module | None = None) -> None:
        self.module = module or Net(0)
        self.optimizer = build(self.module.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.optimizers = [self.optimizer]
        self.source = Source(lambda: whole_state(self.module, self.optimizers))
        self.step = 0

    def train(self, pause: float = 0.02) -> None:
        self.source.hold_still(self.step)
        time.sleep(pause)
        g = torch.Generator().manual_seed(self.step)
        self.module.zero_grad()
        for name, param in self.module.named_parameters():
            if param.requires_grad and (name != "late" or self.step > 4):
                param.grad = torch.randn(param.shape, generator=g).to(param)
        self.source.update(self.step + 1, ())
        for optimizer in self.optimizers:
            optimizer.step()
        self.schedule.step()
        self.step += 1


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(OPTIMIZERS["adamw"])
    yield rank
    rank.source.close("the test is over")


def newcomer(
    build: Build, module: nn.Module | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, StateStream]:
    module = module or Net(1)
    optimizer = build(module.parameters())
    return module, optimizer, StateStream("127.0.0.1", module, [optimizer])


def follow(rank: Rank, stream: StateStream, steps: int = 100) -> None:
    stream.start()
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    for _ in range(steps):
        if stream.complete.is_set() or stream.over.is_set():
            break
        rank.train()
    for _ in range(3):
        rank.train()
    stream.reach(rank.step, lambda: None)


def differing(one: nn.Module, first: Any, other: nn.Module, second: Any) -> list[str]:
    found = []
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(mine, theirs):
            found.append(name)
        states = first.state.get(mine, {}), second.state.get(theirs, {})
        assert states[0].keys() == states[1].keys(), name
        for key, value in states[0].items():
            equal = (
                torch.equal(value, states[1][key])
                if isinstance(value, torch.Tensor)
                else value == states[1][key]
            )
            found += [] if equal else [f"{name} {key}"]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_follows_ends_with_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter a step: most steps are taken with some of them."""
    state, taken = sources._Feed._state, []

    def one_piece(feed: Any, step: int) -> Any:
        message = state(feed, step)
        feed._source.still_after = None
        return message

    take_step = StateStream._take_step
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    monkeypatch.setattr(sources._Feed, "_state", one_piece)
    monkeypatch.setattr(
        StateStream,
        "_take_step",
        lambda s, *taking: (taken.append(len(taking[1])), take_step(s, *taking)),
    )
    rank = Rank(OPTIMIZERS[name])
    rank.train()
    module, optimizer, stream = newcomer(OPTIMIZERS[name])
    follow(rank, stream)
    assert stream.complete.is_set()
    assert stream.step == rank.step
    assert differing(rank.module, rank.optimizer, module, optimizer) == []
    assert min(taken) < 3
    assert max(taken) == 11
    rank.source.close("over")
    stream.close()
    assert not rank.source._feeds


def test_several_optimizers_step_what_is_theirs() -> None:
    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        params = list(module.parameters())
        return [OPTIMIZERS["adam"](params[:4]), OPTIMIZERS["sgd"](params[4:])]

    rank, module = Rank(OPTIMIZERS["sgd"]), Net(1)
    rank.optimizers, theirs = optimizers(rank.module), optimizers(module)
    rank.train()
    stream = StateStream("127.0.0.1", module, theirs)
    follow(rank, stream)
    assert stream.complete.is_set()
    for first, second in zip(rank.optimizers, theirs, strict=True):
        assert first.state
        assert differing(rank.module, first, module, second) == []
    rank.source.close("over")
    stream.close()


def test_two_are_served_and_one_that_joins_gets_no_more(rank: Rank) -> None:
    pairs = [newcomer(OPTIMIZERS["adamw"]) for _ in range(2)]
    for number, (_, _, stream) in enumerate(pairs):
        stream.start()
        rank.source.feed(number, "127.0.0.1", stream.port, stream.token)
    while not all(stream.complete.is_set() for *_, stream in pairs):
        rank.train()
    rank.source.update(rank.step + 1, [1])
    assert pairs[1][2].over.wait(WAIT)
    assert not pairs[0][2].over.is_set()
    pairs[0][2].close()


def test_a_sparse_gradient_is_left_to_the_join() -> None:
    def module(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict({"table": nn.Embedding(6, 2, sparse=True), "dense": nn.Linear(2, 3)})

    build: Build = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    rank, (other, optimizer, stream) = Rank(build, module(0)), newcomer(build, module(1))
    train = rank.train

    def train_sparse() -> None:
        update = rank.source.update

        def with_sparse(step: int, members: Any) -> None:
            weight = rank.module["table"].weight
            weight.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.ones(1, 2), (6, 2))
            update(step, members)

        rank.source.update = with_sparse  # type: ignore[method-assign]
        train()
        rank.source.update = update  # type: ignore[method-assign]

    rank.train = train_sparse  # type: ignore[method-assign]
    follow(rank, stream)
    assert differing(rank.module, rank.optimizer, other, optimizer) == ["table.weight"]
    rank.source.close("over")
    stream.close()


def test_who_reads_nothing_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "LEAST_BEHIND_BYTES", 1)
    rank = Rank(OPTIMIZERS["sgd"], nn.Linear(1500, 1500))
    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.WARNING):
        rank.source.feed(3, "127.0.0.1", listener.getsockname()[1], "token")
        connection, _ = listener.accept()
        began = time.monotonic()
        while rank.source._feeds and time.monotonic() - began < WAIT:
            rank.train()
        assert not rank.source._feeds
        connection.close()
    assert (
        "process 3 gets the rest of its state when it joins, while the others wait: it is"
        in caplog.text
    )


def test_the_end_of_the_source_is_noticed(rank: Rank) -> None:
    module, _, stream = newcomer(OPTIMIZERS["adamw"])
    stream.start()
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    time.sleep(0.1)
    rank.source.close("the fit is over")
    assert stream.over.wait(WAIT)
    assert not stream.complete.is_set()
    began = time.monotonic()
    stream.reach(5, lambda: None)
    assert time.monotonic() - began < WAIT / 2
    _, _, stream = newcomer(OPTIMIZERS["adamw"], module)
    stream.start()
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    assert stream.over.wait(WAIT)
    assert stream.refusal == "the fit is over"


def test_who_has_got_nothing_does_not_hold_the_others_up(rank: Rank) -> None:
    _, _, stream = newcomer(OPTIMIZERS["adamw"])
    began = time.monotonic()
    stream.reach(5, lambda: None)
    stream.start()
    stream.reach(5, lambda: None)
    stream.close()
    assert time.monotonic() - began < WAIT / 2


def test_a_stranger_is_hung_up_on(rank: Rank) -> None:
    module, optimizer, stream = newcomer(OPTIMIZERS["adamw"])
    stream.start()
    stranger = socket.create_connection(("127.0.0.1", stream.port))
    stranger.sendall(b"x" * len(stream.token))
    assert stranger.recv(1) == b""
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    while not stream.complete.is_set():
        rank.train()
    stream.reach(rank.step, lambda: None)
    assert differing(rank.module, rank.optimizer, module, optimizer) == []
    stream.close()


@pytest.mark.parametrize("kind", ["group", "state"])
def test_what_cannot_be_sent_does_not_end_the_training(
    kind: str, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "group":
        rank.optimizer.param_groups[0]["rule"] = lambda: None
    else:
        rank.train()
        rank.optimizer.state[rank.module.scale]["rule"] = lambda: None
    _, _, stream = newcomer(OPTIMIZERS["adamw"])
    stream.start()
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    until = time.monotonic() + WAIT
    while not stream.over.is_set() and time.monotonic() < until:
        rank.train()
    assert stream.over.is_set()
    assert rank.step >= 1
    assert "process 7 gets the rest of its state when it joins" in caplog.text


def test_another_model_is_not_filled(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    module, _, stream = newcomer(OPTIMIZERS["adamw"], nn.Linear(2, 2))
    before = module.weight.clone()
    follow(rank, stream, 20)
    assert stream.over.is_set()
    assert "different models" in caplog.text
    assert torch.equal(module.weight, before)


def test_a_message_is_a_copy() -> None:
    value = torch.ones(3)
    message = Message({"value": value})
    value.zero_()
    left, right = socket.socketpair()
    with left, right:
        message.send(left)
        assert receive(right, torch.device("cpu"))["value"].tolist() == [1.0, 1.0, 1.0]
        left.close()
        with pytest.raises(ConnectionResetError):
            receive(right, torch.device("cpu"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_sends_its_own_shard(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer of sharded ranks has their weights, and the state of each part as its rank
    holds it.
    """
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    make = torch.optim.AdamW
    new = ShardedRank(make, mirrors=True)
    with torch.no_grad():
        for param in new.net.parameters():
            param.fill_(7)
    stream = StateStream("127.0.0.1", new.net, [new.optimizer])
    stream.start()
    steps = 10 * ranks

    def train(comm: Any) -> Any:
        rank = ShardedRank(make, mirrors=True)
        rank.attach(comm)
        algorithm = rank.algorithm
        source = Source(lambda: algorithm.holdings(rank.net, [rank.optimizer]))
        source.feed(7, "127.0.0.1", stream.port, stream.token)
        before_commit = algorithm.before_commit

        def commit() -> None:
            before_commit()
            time.sleep(0.02)
            source.update(number + 1, ())

        algorithm.before_commit = commit  # type: ignore[method-assign]
        for number in range(steps):
            source.hold_still(number)
            rank.step(comm, number)
        numbers = {param: index for index, param in enumerate(rank.net.parameters())}
        before = algorithm._shards_before()
        parts = {span: before.inventory(numbers).cut(span) for span in before.own(numbers)}
        source.finish_feeds()
        comm.barrier()
        return rank, parts

    results = run_ranks(ranks, train)
    assert stream.over.wait(WAIT)
    assert stream.complete.is_set()
    assert stream.step == steps
    stream.close()
    assert not new.optimizer.state
    for param, other in zip(new.net.parameters(), results[0][0].net.parameters(), strict=True):
        assert torch.equal(param, other)
    for _, parts in results:
        for span, (state,) in parts.items():
            held = stream.parts.get(span)
            if not span.numel:
                continue
            assert held is not None
            assert (held[0] is None) == (state is None)
            for key, value in (state or {}).items():
                assert torch.equal(held[0][key], value), (span, key)


def test_who_comes_no_further_joins_with_what_it_has(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces that were sent are stepped on, the others have to be sent when it joins."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    monkeypatch.setattr(pace, "STEPS", 2)
    monkeypatch.setattr(pace, "SECONDS", 0.0)
    monkeypatch.setattr(pace, "PART", 1.1)  # even state alone would be too little
    module, optimizer, stream = newcomer(OPTIMIZERS["adamw"])
    state, sent = sources._Feed._state, []

    def one_piece(feed: Any, step: int) -> Any:
        message = state(feed, step)
        feed._source.still_after = None
        sent.append(list(feed._sent))
        return message

    monkeypatch.setattr(sources._Feed, "_state", one_piece)
    follow(rank, stream)
    assert stream.complete.is_set()
    stream.close()
    pieces = whole_state(rank.module, rank.optimizers).pieces
    came = [pieces[number].index for number in sent[-1]]
    pairs = list(zip(rank.module.parameters(), module.parameters(), strict=True))
    assert 0 < len(came) < len(pieces)
    assert "gradients of what was sent leave no room for it" in caplog.text
    for index in came:
        mine, theirs = pairs[index]
        assert torch.equal(mine, theirs)
        for key, value in rank.optimizer.state.get(mine, {}).items():
            assert torch.equal(value, optimizer.state[theirs][key])
    assert not all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_newcomer_counts_what_has_come_but_for_large_tensors(rank: Rank) -> None:
    rank.train()
    module = Net(1)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    stream = StateStream("127.0.0.1", module, [optimizer])
    assert stream.num_senders == 0
    stream.start()
    rank.source.feed(7, "127.0.0.1", stream.port, stream.token)
    rank.source.hold_still(rank.step)
    assert stream.complete.wait(WAIT)
    sizes = [param.nbytes for param in module.parameters()]
    states = [value.nbytes for state in rank.optimizer.state.values() for value in state.values()]
    assert stream.num_senders == 1
    assert stream.count_bytes(10**9) == (sum(sizes), sum(states))
    largest = max(sizes)
    assert stream.count_bytes(largest - 1) == (
        sum(size for size in sizes if size < largest),
        sum(size for size in states if size < largest),
    )
    stream.close()
