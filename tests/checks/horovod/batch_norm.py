"""`SyncBatchNorm` of `lightning_ring.horovod`."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import lightning_ring.horovod as hvd

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)


def check_batch_norm_sees_the_samples_of_all_ranks() -> None:
    hvd.init()
    rows = [2 + rank for rank in range(SIZE)]
    rows[-1] = 0 if SIZE > 2 else 1
    torch.manual_seed(0)
    for shape, options in (
        ((3, 5), {"momentum": None}),
        ((4,), {"affine": False}),
        ((3, 2, 2), {}),
        ((3, 1), {}),
    ):
        ours = hvd.SyncBatchNorm(shape[0], **options).double()
        whole = (
            torch.nn.BatchNorm1d(shape[0], **options)
            if len(shape) < 3
            else torch.nn.BatchNorm2d(shape[0])
        )
        whole.double()
        if ours.affine:
            with torch.no_grad():
                for module in (ours, whole):
                    module.weight.copy_(torch.arange(1.0, shape[0] + 1))
        for _ in range(2):
            everyones = (
                torch.randn(sum(rows), *shape, dtype=torch.float64).add_(100).requires_grad_()
            )
            factors = torch.randn(sum(rows), *shape, dtype=torch.float64)
            mine = everyones.detach().split(rows)[RANK].clone().requires_grad_()
            output = ours(mine)
            expected = whole(everyones)
            torch.testing.assert_close(output, expected.split(rows)[RANK], atol=1e-10, rtol=1e-10)
            (output * factors.split(rows)[RANK]).sum().backward()
            (expected * factors).sum().backward()
            assert everyones.grad is not None
            torch.testing.assert_close(
                mine.grad, everyones.grad.split(rows)[RANK], atol=1e-10, rtol=1e-10
            )
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer, atol=1e-10, rtol=1e-10)
        for name, param in whole.named_parameters():
            total = hvd.allreduce(ours.get_parameter(name).grad, op=hvd.Sum)
            torch.testing.assert_close(total, param.grad, atol=1e-10, rtol=1e-10)
        inputs = torch.randn(2, *shape, dtype=torch.float64)
        torch.testing.assert_close(ours.eval()(inputs), whole.eval()(inputs))
    with pytest.raises(
        ValueError, match="Expected more than 1 value per channel when training, got 1"
    ):
        hvd.SyncBatchNorm(2)(torch.zeros(int(RANK == 0), 2))
    half = hvd.SyncBatchNorm(2)(torch.randn(3, 2).to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
