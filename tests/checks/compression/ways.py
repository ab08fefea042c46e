"""Every way to compress, and one backward sent through each."""

import math
from functools import partial

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import ChainedWork, ReduceOp
from lightning_ring.gradients.compression import (
    BF16,
    COMPRESSORS,
    DGC,
    Compressor,
    ErrorFeedback,
    Int8,
    OneBit,
    PowerSGD,
    TernGrad,
    TopK,
)
from lightning_ring.gradients.reducer import Reducer
from tests.checks.world import communicator

torch.set_num_threads(1)


class Signs(Compressor):
    """A user's own, as the documentation describes one: signs and a scale, and nothing but
    `all_reduce`.
    """

    name = "signs"

    def all_reduce(self, flat, comm, *, lost=None, name=""):
        if lost is not None:
            lost.copy_(flat)
        flat.copy_(flat.sign() * flat.abs().mean())
        if lost is not None:
            lost.sub_(flat)
        return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)


class Tenth(Compressor):
    """Another one: every rank's largest tenth, as values and indices, in one all-gather."""

    name = "tenth"

    def all_reduce(self, flat, comm, *, lost=None, name=""):
        indices = flat.abs().topk(math.ceil(flat.numel() / 10)).indices
        rows = torch.empty(comm.world_size, 2, indices.numel())
        rows[comm.shard_index] = torch.stack([flat[indices], indices.float()])

        def arrived():
            if lost is not None:
                lost.copy_(flat)
                lost[indices] = 0
            flat.zero_()
            for values, places in rows:
                flat.index_add_(0, places.long(), values / comm.world_size)

        return ChainedWork(comm.all_gather_(rows.view(-1), name=name), arrived)


WAYS = {name: known.build for name, known in COMPRESSORS.items()}
WAYS["signs"] = lambda: ErrorFeedback(Signs())
WAYS["tenth"] = lambda: ErrorFeedback(Tenth())
WAYS["bf16 with error feedback"] = lambda: ErrorFeedback(BF16())
WAYS["int8 with error feedback"] = lambda: ErrorFeedback(Int8(min_numel=0))
WAYS["powersgd"] = partial(PowerSGD, rank=2, start_iter=0)
WAYS["int8"] = partial(Int8, min_numel=0)
WAYS["onebit"] = partial(OneBit, min_numel=0)
WAYS["terngrad"] = partial(TernGrad, min_numel=0)
WAYS["topk"] = partial(TopK, 0.1, min_numel=0)
WAYS["dgc"] = partial(DGC, 0.1, momentum=0, warmup_steps=0, min_numel=0)


ERROR_FED = ("powersgd", "signs", "tenth", "onebit", "topk", "dgc")
COARSE = (*ERROR_FED, "terngrad")  # right over several steps only
ERROR_OF_THE_MEAN = dict.fromkeys(ERROR_FED, 0.15) | {
    "terngrad": 0.25,
    "int8": 0.015,
    "int8 with error feedback": 0.015,
}  # the others: 0.004


def parameters():
    """A matrix, a vector, a scalar, an empty one, and a convolution as channels-last has it."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "matrix": (24, 31),
        "vector": (13,),
        "scalar": (),
        "empty": (0, 4),
        "conv": (16, 8, 3, 3),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["conv"] = made["conv"].to(memory_format=torch.channels_last)
    return [(name, Parameter(value)) for name, value in made.items()]


def gradients(rank, step=0):
    """What ``rank`` contributes: known to every rank, so that each can compute the average
    itself.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        for _, param in parameters()
    ]


def average(step=0, ranks=None):
    """In float64, over the first ``ranks``."""
    size = ranks or communicator().world_size
    every = [gradients(rank, step) for rank in range(size)]
    return [torch.stack([g.double() for g in same]).mean(0) for same in zip(*every, strict=True)]


def send(reducer, params, grads):
    """One backward that produces ``grads``, through the reducer; what it left in ``param.grad``."""
    for param in params:
        param.grad = None
    used = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    with reducer.backward():
        if used:
            sum((param * grad).sum() for param, grad in used).backward()
    return [param.grad if param.grad is None else param.grad.clone() for param in params]


def make(way):
    named = parameters()
    compressor = WAYS[way]() if isinstance(way, str) else way
    reducer = Reducer(communicator(), named, compressor=compressor)
    return reducer, [param for _, param in named]


def assert_same_bits(*tensors):
    flat = torch.cat(
        [t.detach().reshape(-1).double() for t in tensors if t is not None] + [torch.zeros(1)]
    )
    for other in communicator().all_gather(flat):
        assert torch.equal(other.nan_to_num(nan=7.0), flat.nan_to_num(nan=7.0)), (
            "ranks hold different bits"
        )
