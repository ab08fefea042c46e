"""Backward passes that add to an average of which each rank has its shard, compared with whole gradients."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ring.errors import RingError
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.shard_reducer import ShardReducer
from tests.thread_ranks import ThreadCommunicator, run_ranks

RANKS = 3
WAYS = ["reduced", "local", "no_sync", "autograd.grad", "zero to none", "zero", "part", "local part"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor, part: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return (hidden if part else self.second(hidden)).square().sum()


START = Net()


def inputs(number: int, rank: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank))


def run(comm: ThreadCommunicator, kind: type[Reducer], ways: tuple[str, ...], keep: bool) -> list[Tensor | None]:
    """What of the gradients is valid on this rank after ``ways``; NaN elsewhere."""
    net = copy.deepcopy(START)
    reducer = kind(comm, net.named_parameters(), bucket_cap_mb=0.0001)
    kept: list[Any] = []
    for number, way in enumerate(("reduced", "zero to none", *ways, "reduced")):
        loss = net(inputs(number, comm.rank), part="part" in way)
        if way in ("reduced", "part"):
            with reducer.backward():
                loss.backward()
        elif way in ("local", "local part"):
            loss.backward()
        elif way == "no_sync":
            with reducer.no_sync(), reducer.backward():
                loss.backward()
        elif way == "autograd.grad":
            torch.autograd.grad(loss, list(net.parameters()))
        else:
            net.zero_grad(set_to_none=way == "zero to none")
        if keep:
            kept += [param.grad for param in net.parameters()]
    return [_valid(reducer, param) for param in net.parameters()]


def _valid(reducer: Reducer, param: nn.Parameter) -> Tensor | None:
    if not isinstance(reducer, ShardReducer) or param.grad is None:
        return param.grad
    bucket, start, stop = reducer.shards.bounds(param)
    index = next(index for index, other in enumerate(bucket.params) if other is param)
    offset = int(bucket.views[index].storage_offset() - bucket.flat.storage_offset())
    result = torch.full((param.numel(),), torch.nan, dtype=param.dtype)
    own = reducer.shards.of_gradient(param)
    assert own is not None
    result[start - offset : stop - offset] = own
    return result.view(param.shape)


@pytest.mark.ranks
@pytest.mark.parametrize("length", [1, 2, 3])
def test_equals_whole_gradients(length: int) -> None:
    sequences = list(itertools.product(WAYS, repeat=length))
    for number, ways in enumerate(random.Random(0).sample(sequences, min(len(sequences), 24))):
        whole = run_ranks(RANKS, lambda comm: run(comm, Reducer, ways, False))  # noqa: B023
        parts = run_ranks(RANKS, lambda comm: run(comm, ShardReducer, ways, number % 2 == 0))  # noqa: B023
        for index, expected in enumerate(whole[0]):
            found = torch.stack([rank[index] for rank in parts])  # every element is valid on one rank
            assert expected is not None
            assert torch.equal(found.isnan().sum(0), torch.full_like(expected, RANKS - 1))
            torch.testing.assert_close(found.nan_to_num().sum(0), expected, msg=lambda m: f"{ways}: {m}")  # noqa: B023


@pytest.mark.parametrize(
    "change",
    [lambda param: param.grad.mul_(0.5), lambda param: setattr(param, "grad", param.grad * 0.5)],
    ids=["in place", "replaced"],
)
def test_a_sum_that_cannot_be_told_is_an_error(change: Callable[[nn.Parameter], object]) -> None:
    def rank(comm: ThreadCommunicator) -> None:
        net = copy.deepcopy(START)
        reducer = ShardReducer(comm, net.named_parameters())
        for number in range(2):
            with reducer.backward():
                net(inputs(number, comm.rank), False).backward()
        net(inputs(3, comm.rank), False).backward()
        change(net.first.weight)
        with reducer.backward():
            net(inputs(4, comm.rank), False).backward()

    with pytest.raises(RingError, match=r"gradient of first.weight.*zero_grad\(\)"):
        run_ranks(2, rank)
