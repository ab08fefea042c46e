"""16-bit tensors are summed in float32 and rounded once, on thread-ranks."""

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.exchange import wide_reduce_scatter_
from lightning_ring.comm.ring import scratch_bytes
from tests.checks.reductions import HALVES, rounded_once
from tests.thread_ranks import run_ranks

SMALL_PIECES = 256


def values(numel, dtype, world_size):
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("numel", [0, 1, 7, 5003])
def test_the_shard_is_the_float32_sum_rounded_once(dtype, op, world_size, numel):
    inputs = values(numel, dtype, world_size)

    def rank(comm):
        scratch = torch.empty(scratch_bytes(SMALL_PIECES), dtype=torch.uint8)
        kept = {"scratch": scratch, "piece_bytes": SMALL_PIECES}
        pieces = wide_reduce_scatter_(inputs[comm.rank].clone(), comm.transport, op, **kept)
        return pieces, wide_reduce_scatter_(inputs[comm.rank].clone(), comm.transport, op)

    for index, outputs in enumerate(run_ranks(world_size, rank)):
        for output in outputs:
            assert torch.equal(
                shard(output, world_size, index), shard(rounded_once(inputs, op), world_size, index)
            )


def every_value(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bits(given, expected):
    """Elementwise; one NaN is as good as another."""
    return (given.view(torch.int16) == expected.view(torch.int16)) | (
        given.isnan() & expected.isnan()
    )


def test_of_two_bfloat16_the_sum_of_halves_is_the_float32_average_rounded_once():
    """But for values whose half is rounded, next to which the average may be its neighbour."""
    values, generator = every_value(torch.bfloat16), torch.Generator().manual_seed(0)
    coarse = (values.abs() < 2.0**-125) & (values != 0)
    for _ in range(4):
        order = torch.randperm(2**16, generator=generator)
        expected = (values.float() * 0.5 + values[order].float() * 0.5).to(torch.bfloat16)
        outputs = run_ranks(
            2,
            lambda comm, ranks=(values, values[order]): average_of_two(
                ranks[comm.rank].clone(), comm
            ),
        )
        for output in outputs:
            assert torch.equal(output.view(torch.int16), outputs[0].view(torch.int16))
            same = same_bits(output, expected)
            assert (same | coarse | coarse[order]).all()
            off = (output.double() - expected.double()).abs()
            assert (same | (off <= expected.double().abs() * 2.0**-7 + 2.0**-133)).all()


def average_of_two(flat, comm):
    comm.all_reduce_(flat, op=ReduceOp.AVG).wait()
    return flat
