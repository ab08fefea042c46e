"""The NCCL backend over a fake of NCCL: what it asks NCCL for, and what it does itself."""

from __future__ import annotations

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp, shard
from tests.comm.backends.fake_nccl import over_fake_nccl
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [4096, 4099])  # 4099: shards of different lengths travel as a padded copy
def test_16_bit_averages_have_no_common_factor(monkeypatch, dtype, numel):
    """1/3 in bfloat16 is 0.33398: NCCL's own average is 0.2 % too long."""
    open_nccl = over_fake_nccl(monkeypatch)
    inputs = [(torch.randn(numel, generator=torch.Generator().manual_seed(7)) + 3).to(dtype) for _ in range(3)]
    exact = torch.stack([tensor.double() for tensor in inputs]).mean(0)

    def rank(comm):
        nccl = open_nccl(comm)
        whole, halves = inputs[comm.rank].clone(), inputs[comm.rank].clone()
        nccl.all_reduce_(whole, op=ReduceOp.AVG).wait()
        nccl.reduce_scatter_(halves, op=ReduceOp.AVG).wait()
        nccl.all_gather_(halves).wait()
        return whole, halves

    for results in run_ranks(3, rank):
        for average in results:
            factor = float(average.double() @ exact / (exact @ exact))
            assert abs(factor - 1) < 1e-4


def test_float32_averages_and_16_bit_sums_are_nccl_s(monkeypatch):
    open_nccl = over_fake_nccl(monkeypatch)

    def rank(comm):
        nccl = open_nccl(comm)
        nccl.all_reduce_(torch.ones(8), op=ReduceOp.AVG).wait()
        summed = torch.ones(8, dtype=torch.bfloat16)
        nccl.all_reduce_(summed).wait()
        halves = torch.ones(8, dtype=torch.int32)
        nccl.reduce_scatter_(halves, op=ReduceOp.AVG).wait()
        assert torch.equal(summed, torch.full((8,), 3, dtype=torch.bfloat16))
        assert torch.equal(shard(halves, 3, comm.rank), torch.ones_like(shard(halves, 3, comm.rank)))
        return nccl._group.calls

    expected = [("all_reduce", torch.distributed.ReduceOp.AVG), ("all_reduce", torch.distributed.ReduceOp.SUM)]
    for calls in run_ranks(3, rank):
        assert calls == [*expected, ("reduce_scatter", torch.distributed.ReduceOp.SUM)]
