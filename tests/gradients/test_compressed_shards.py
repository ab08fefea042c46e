"""Compressed gradients of which each rank gets a part, among thread-ranks."""

import torch
from torch import nn

from lightning_ring.gradients.compression import Int8
from lightning_ring.gradients.reducer import Reducer
from tests.thread_ranks import run_ranks

SIZES = [(40,), (5, 3), (20,)]  # the last one is in the block of 256 that holds the flags


def average_three_times(comm, scale):
    """This rank's parts, in three backwards with the same gradients. The layout changes after
    none of them.
    """
    params = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    compressor = Int8(min_numel=0)
    reducer = Reducer(comm, named, compressor=compressor, shards=True)
    parts = []
    for _ in range(3):
        for param in params:
            param.grad = None
        with reducer.backward():
            pairs = zip(params, gradients(comm.rank, scale), strict=True)
            sum((param * gradient).sum() for param, gradient in pairs).backward()
        parts.append(
            [
                part.clone()
                for param in params
                if (part := reducer.shards.of_gradient(param)) is not None
            ]
        )
    return parts


def gradients(rank, scale):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) * scale for size in SIZES]


def test_the_first_backward_gives_the_bits_of_later_ones():
    """It is the first one after a resume, and a later one in a training that was not stopped."""
    for first, *others in run_ranks(2, lambda comm: average_three_times(comm, 1.0)):
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_small_gradients_beside_the_flags_of_a_bucket_do_not_become_zero():
    ranks = run_ranks(2, lambda comm: average_three_times(comm, 1e-4))
    expected = [
        torch.stack(pair).mean(0)
        for pair in zip(gradients(0, 1e-4), gradients(1, 1e-4), strict=True)
    ]
    for parts in zip(*ranks, strict=True):
        for of_ranks, whole in zip(zip(*parts, strict=True), expected, strict=True):
            torch.testing.assert_close(
                torch.cat(of_ranks), whole.reshape(-1), rtol=0, atol=0.02 * 1e-4 * 3
            )
