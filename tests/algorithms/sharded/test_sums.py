"""Backward passes that add to an average of which each rank has its shard, compared with whole
gradients.
"""

import copy
import itertools
import pickle
import random
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ring.errors import RingError
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sharded_gradient import ShardedGradient
from tests.thread_ranks import run_ranks

SHARDS = partial(Reducer, shards=True)

RANKS = 3
WAYS = [
    "reduced",
    "local",
    "no_sync",
    "autograd.grad",
    "zero to none",
    "zero",
    "part",
    "local part",
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, x, part):
        hidden = torch.tanh(self.first(x))
        return (hidden if part else self.second(hidden)).square().sum()


START = Net()


def inputs(number, rank):
    return torch.randn(
        4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + rank)
    )


def run(comm, kind, ways, keep):
    """What of the gradients is valid on this rank after ``ways``; NaN elsewhere."""
    net = copy.deepcopy(START)
    reducer = kind(comm, net.named_parameters(), bucket_cap_mb=0.0001)
    kept = []
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


def _own(reducer, param):
    """This rank's part of a gradient, which may have been added to since it was averaged."""
    grad, part = param.grad, reducer.shards.part(param)
    if not isinstance(grad, ShardedGradient):
        return part.of(grad)
    local = grad.contents.local
    return grad.contents.average + (part.of(part.laid_out(local)) if local is not None else 0)


def _valid(reducer, param):
    if not reducer.sharded or param.grad is None:
        return param.grad
    bucket, start, stop = reducer.shards.bounds(param)
    index = next(index for index, other in enumerate(bucket.params) if other is param)
    offset = int(bucket.views[index].storage_offset() - bucket.flat.storage_offset())
    result = torch.full((param.numel(),), torch.nan, dtype=param.dtype)
    result[start - offset : stop - offset] = _own(reducer, param)
    return result.view(param.shape)


@pytest.mark.ranks
@pytest.mark.parametrize("length", [1, 2, 3])
def test_equals_whole_gradients(length):
    sequences = list(itertools.product(WAYS, repeat=length))
    for number, ways in enumerate(random.Random(0).sample(sequences, min(len(sequences), 24))):
        whole = run_ranks(RANKS, lambda comm: run(comm, Reducer, ways, False))  # noqa: B023
        parts = run_ranks(RANKS, lambda comm: run(comm, SHARDS, ways, number % 2 == 0))  # noqa: B023
        for index, expected in enumerate(whole[0]):
            # every element is valid on one rank
            found = torch.stack([rank[index] for rank in parts])
            assert expected is not None
            assert torch.equal(found.isnan().sum(0), torch.full_like(expected, RANKS - 1))
            found_sum = found.nan_to_num().sum(0)
            torch.testing.assert_close(found_sum, expected, msg=lambda m: f"{ways}: {m}")  # noqa: B023


CHANGES = {
    "scale": lambda param: param.grad.mul_(0.5),
    "scale, to a new tensor": lambda param: setattr(param, "grad", param.grad * 0.5),
    "scale all at once": lambda param: torch._foreach_add_(
        [param.grad, param.grad], [param, param], alpha=0.1
    ),
    "clip by value": lambda param: nn.utils.clip_grad_value_([param], 0.05),
    "mask": lambda param: setattr(param, "grad", torch.where(param > 0, param.grad, 0.0)),
    "a copy": lambda param: setattr(param, "grad", copy.deepcopy(param.grad)),
    "zeros": lambda param: setattr(param, "grad", torch.zeros_like(param.grad)),
    "a whole tensor": lambda param: setattr(param, "grad", torch.ones_like(param)),
    "another layout": lambda param: param.grad.copy_(torch.ones_like(param).t().contiguous().t()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_backwards_that_accumulate_equal_those_of_whole_gradients(change):
    def rank(comm, kind):
        net = copy.deepcopy(START)
        reducer = kind(comm, net.named_parameters(), bucket_cap_mb=0.0001)
        for number in range(4):
            if number == 2:
                net.zero_grad(set_to_none=False)
            with reducer.backward():
                net(inputs(number, comm.rank), False).backward()
            for param in net.parameters():
                change(param)
        return [_valid(reducer, param) for param in net.parameters()]

    whole = run_ranks(RANKS, lambda comm: rank(comm, Reducer))[0]
    parts = run_ranks(RANKS, lambda comm: rank(comm, SHARDS))
    for index, expected in enumerate(whole):
        found = torch.stack([rank[index] for rank in parts])
        torch.testing.assert_close(found.nan_to_num().sum(0), expected)


def reduced_once(comm):
    net = copy.deepcopy(START)
    with Reducer(comm, net.named_parameters(), shards=True).backward():
        net(inputs(0, comm.rank), False).backward()
    return net


READS = {
    "norm": lambda param, _: param.grad.norm(),
    "norms": lambda param, _: torch._foreach_norm([param.grad]),
    "item": lambda param, _: param.grad.max().item(),
    "an element": lambda param, _: param.grad[0],
    "product": lambda param, _: param.grad @ param.grad.T,
    "NumPy": lambda param, _: param.grad.detach().cpu().numpy(),
    "pickled": lambda param, _: pickle.dumps(param.grad),
    "into a whole tensor": lambda param, _: torch.zeros_like(param).add_(param.grad),
    "of another parameter": lambda param, other: param.grad + other.grad,
    "as new parameters": lambda param, _: (
        setattr(param, "data", param.data - param.grad),
        param.sum(),
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_an_error_that_says_what_to_do(read):
    def rank(comm):
        net = reduced_once(comm)
        assert "first.weight" in repr(net.first.weight.grad)
        with pytest.raises(
            RuntimeError, match=r"first\.weight.*Under strategy='ring_sharded' each rank"
        ):
            read(net.first.weight, net.first.bias)

    run_ranks(2, rank)


def test_gradients_that_other_code_holds_keep_their_values_or_cannot_be_read():
    def rank(comm):
        net = copy.deepcopy(START)
        param = net.first.weight
        reducer = Reducer(comm, net.named_parameters(), shards=True)

        def backward(number):
            with reducer.backward():
                net(inputs(number, comm.rank), False).backward()
            return param.grad

        first, alias, copied = (one := backward(0)), one.detach(), one.clone()
        net.zero_grad()
        second = backward(1)
        for held in (first, alias):
            assert torch.equal(held.contents.average, copied.contents.average)
        if comm.rank == 1:  # rank 0 has no part of this gradient
            assert not torch.equal(second.contents.average, copied.contents.average)
        assert backward(2) is second, "as it is a sum, whoever holds it sees the sum"
        net.zero_grad()
        net(inputs(3, comm.rank), False).backward()
        local = param.grad
        assert local.norm() > 0
        backward(4)
        with pytest.raises(
            RuntimeError, match=r"was first.weight.grad before a backward averaged it"
        ):
            local.norm()

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "use",
    [lambda param: param.grad.mul_(0.5), lambda param: torch._foreach_mul_([param.grad], 0.5)],
)
def test_a_sum_that_is_not_averaged_cannot_be_changed(use):
    def rank(comm):
        net = reduced_once(comm)
        net(inputs(1, comm.rank), False).backward()
        with pytest.raises(
            RingError, match=r"added to first.weight.grad after it was averaged.*zero_grad\(\)"
        ):
            use(net.first.weight)
        net.zero_grad(set_to_none=False)
        use(net.first.weight)

    run_ranks(2, rank)


def test_a_gradient_of_an_earlier_training_is_an_error():
    def rank(comm):
        net = copy.deepcopy(START)
        for _ in range(2):
            reducer = Reducer(comm, net.named_parameters(), shards=True)
            with reducer.backward():
                net(inputs(0, comm.rank), False).backward()
            reducer.remove()

    with pytest.raises(RingError, match=r"parameter of an earlier training.*zero_grad\(\)"):
        run_ranks(2, rank)
