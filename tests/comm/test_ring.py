"""The ring against a plain reduction, on thread-ranks."""

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.exchange import all_reduce_directly_, broadcast_
from lightning_ring.comm.ring import all_gather_, all_reduce_, reduce_scatter_, scratch_bytes
from tests.checks.reductions import plain, tolerance, values
from tests.thread_ranks import run_ranks

every_size = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
LENGTHS = [0, 1, 7, 1024, 5003]  # 0, 1, 7: some ranks get an empty shard
SMALL_PIECES = 256  # bytes, so that short tensors travel in many pieces too


def assert_reduced(outputs, inputs, op):
    torch.testing.assert_close(outputs[0], plain(inputs, op), **tolerance(inputs[0].dtype))
    for output in outputs:
        assert torch.equal(output, outputs[0])  # all ranks hold the same bits


@every_size
@pytest.mark.parametrize("reduce", [all_reduce_, all_reduce_directly_])
def test_all_reduce_equals_sum(world_size, reduce):
    every = [values(numel, torch.float64, world_size) for numel in LENGTHS]
    results = run_ranks(
        world_size,
        lambda comm: [reduce(inputs[comm.rank].clone(), comm.transport) for inputs in every],
    )
    for inputs, *outputs in zip(every, *results, strict=True):
        assert_reduced(outputs, inputs, ReduceOp.SUM)


@every_size
def test_reduce_scatter_leaves_rank_r_with_shard_r(world_size):
    every = [values(numel, torch.float64, world_size) for numel in LENGTHS]

    def rank(comm):
        for inputs in every:
            outputs = [inputs[comm.rank].clone() for _ in range(2)]
            scratch = torch.empty(scratch_bytes(SMALL_PIECES), dtype=torch.uint8)
            pieces = {"piece_bytes": SMALL_PIECES, "scratch": scratch}
            reduce_scatter_(outputs[0], comm.transport, ReduceOp.AVG)
            reduce_scatter_(outputs[1], comm.transport, ReduceOp.AVG, **pieces)
            whole, cut, right = (
                shard(flat, world_size, comm.rank)
                for flat in (*outputs, plain(inputs, ReduceOp.AVG))
            )
            torch.testing.assert_close(cut, right)
            assert torch.equal(cut, whole)

    run_ranks(world_size, rank)


@every_size
def test_all_gather_fills_from_the_shards(world_size):
    def rank(comm):
        for numel in LENGTHS:
            whole, flat = torch.arange(numel, dtype=torch.float32), torch.full((numel,), -1.0)
            shard(flat, world_size, comm.rank).copy_(shard(whole, world_size, comm.rank))
            assert torch.equal(all_gather_(flat, comm.transport, piece_bytes=SMALL_PIECES), whole)

    run_ranks(world_size, rank)


@every_size
def test_broadcast(world_size):
    def rank(comm):
        for numel in LENGTHS:
            for src in {0, world_size - 1}:
                flat = torch.arange(numel) + 10_000 * comm.rank
                output = broadcast_(flat, comm.transport, src, piece_bytes=SMALL_PIECES)
                assert torch.equal(output, torch.arange(numel) + 10_000 * src)

    run_ranks(world_size, rank)
