"""Each compressor against its paper's formula in NumPy (`references`), on the ranks of the
battery.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_ring.gradients.compression import DGC, ErrorFeedback, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.between_nodes import BetweenNodes
from tests.checks.compression import references
from tests.checks.world import communicator

# of the layers: shards are no multiples of blocks, on any number of ranks
SIZES = (3000, 700, 1, 1302)
LAYERS = [slice(sum(SIZES[:i]), sum(SIZES[: i + 1])) for i in range(len(SIZES))]


@dataclass
class OneTensor:
    """The layout of layers that lie side by side."""

    flat: Tensor
    sizes: tuple[int, ...] = SIZES

    @property
    def names(self):
        return [str(size) for size in self.sizes]

    @property
    def views(self):
        return list(self.flat.split(self.sizes))

    @property
    def contributed(self):
        return [True] * len(self.sizes)

    @property
    def used(self):
        return torch.ones(len(self.sizes))


def gradient(rank, step):
    """Layers of different sizes of values."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.cat(
        [torch.randn(size, generator=generator) * 4.0**i for i, size in enumerate(SIZES)]
    )


class Sender:
    """One flat tensor, sent again and again through a compressor."""

    def __init__(self, compressor, comm):
        self.compressor, self.comm = compressor, comm
        self.flat = torch.zeros(sum(SIZES))
        compressor.prepare(self.flat, OneTensor(self.flat))

    def __call__(self, values):
        self.flat.copy_(values)
        self.compressor.begin_backward()
        self.compressor.all_reduce(self.flat, self.comm, name="bucket").wait()
        return self.flat.clone()


def assert_equals(compressor, formula, comm, num_steps=6):
    send, size = Sender(compressor, comm), comm.world_size
    for step in range(num_steps):
        found = send(gradient(comm.rank, step))
        wanted = formula([gradient(rank, step).numpy() for rank in range(size)])
        scale = np.abs(wanted).max()
        # a tie, or a value near 0, may be rounded otherwise
        wrong = np.abs(found.numpy() - wanted) > 1e-4 * scale
        assert wrong.mean() < 0.002, (compressor.name, step, wrong.sum())


def check_dgc_is_algorithm_4():
    compressor = DGC(0.002, momentum=0.9, clip_norm=40.0, warmup_steps=4, min_numel=0)
    ratios = [0.25, 0.0625, 0.015625, 0.004, 0.002, 0.002, 0.002]
    assert_equals(
        compressor, references.dgc(ratios, 0.9, 40.0, LAYERS), communicator(), num_steps=7
    )
    velocity = torch.cat([compressor.velocity(str(size)) for size in SIZES])
    assert 0 < velocity.count_nonzero() < velocity.numel()  # sent ones are masked


def check_terngrad_draws_the_scalers_multiples_with_the_right_mean():
    comm = communicator()
    send, size = Sender(TernGrad(min_numel=0), comm), comm.world_size
    every = [gradient(rank, 0).numpy() for rank in range(size)]
    scalers = references.terngrad_scalers(every, LAYERS, 2.5)
    total, num_draws = torch.zeros(sum(SIZES), dtype=torch.float64), 100
    for _ in range(num_draws):
        found = send(gradient(comm.rank, 0))
        for layer, scaler in zip(LAYERS, scalers, strict=True):
            numbers = found[layer].double() * size / scaler
            torch.testing.assert_close(numbers, numbers.round(), rtol=0, atol=1e-4)
            assert numbers.abs().max() <= size + 1e-4
        total += found
    mean = total / num_draws
    for layer, scaler in zip(LAYERS, scalers, strict=True):
        clipped = np.mean([np.clip(g[layer], -scaler, scaler) for g in every], axis=0)
        # a draw of a rank has a variance of at most s²/4 + g²-ish, below s²
        errors = (mean[layer].numpy() - clipped) / (scaler / math.sqrt(size * num_draws))
        assert np.abs(errors).max() < 5, errors
        assert abs(errors.mean()) < 4 / math.sqrt(len(errors)), errors.mean()


def check_what_is_lost_and_what_arrives_make_up_the_gradients():
    """For every compressor that takes part in error feedback: mean of p = average + mean of what
    was lost.
    """
    comm = communicator()
    for compressor in (Int8(0), TernGrad(min_numel=0), TopK(0.05, 0).compressor):
        assert isinstance(compressor, BetweenNodes)
        flat, lost = gradient(comm.rank, 0), torch.full((sum(SIZES),), torch.nan)
        compressor.prepare(flat, OneTensor(flat))
        compressor.all_reduce(flat, comm, lost=lost, name="bucket").wait()
        owed = torch.stack(comm.all_gather(lost)).mean(0)
        mean = torch.stack([gradient(rank, 0) for rank in range(comm.world_size)]).mean(0)
        torch.testing.assert_close(flat + owed, mean, rtol=1e-4, atol=1e-4)


def check_inf_reaches_every_rank_and_leaves_no_trace():
    comm = communicator()
    for compressor in (
        *(Int8(0), ErrorFeedback(Int8(0)), OneBit(0), TernGrad(min_numel=0), TopK(0.05, 0)),
        DGC(0.05, warmup_steps=0, min_numel=0),
    ):
        send = Sender(compressor, comm)
        assert send(gradient(comm.rank, 0)).isfinite().all()
        for bad in (math.inf, math.nan):
            values = gradient(comm.rank, 1)
            if comm.rank == comm.world_size - 1:
                values[1234] = bad
            assert not send(values)[1234].isfinite(), (compressor.name, bad)
        for step in range(2, 5):
            found = send(gradient(comm.rank, step))
            assert found.isfinite().all(), compressor.name
            assert all(torch.equal(other, found) for other in comm.all_gather(found))


def check_small_buckets_travel_as_they_are():
    comm = communicator()
    for compressor in (Int8(), OneBit(), TernGrad(), TopK(), DGC(momentum=0, warmup_steps=0)):
        flat = torch.full((4000,), float(comm.rank))
        compressor.prepare(flat, OneTensor(flat, (4000,)))
        compressor.all_reduce(flat, comm, name="bucket").wait()
        assert torch.equal(flat, torch.full((4000,), (comm.world_size - 1) / 2))
