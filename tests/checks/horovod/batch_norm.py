"""`SyncBatchNorm` of `lightning_ring.horovod`."""

import functools

import pytest
import torch

import lightning_ring.horovod as hvd
from tests.checks.horovod.world import RANK, SIZE

assert_close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)


def check_batch_norm_sees_the_samples_of_all_ranks():
    hvd.init()
    rows = [2 + rank for rank in range(SIZE)]
    rows[-1] = 0 if SIZE > 2 else 1
    torch.manual_seed(0)
    cases = [((3, 5), {"momentum": None}), ((4,), {"affine": False}), ((3, 2, 2), {}), ((3, 1), {})]
    for shape, options in cases:
        kind = torch.nn.BatchNorm1d if len(shape) < 3 else torch.nn.BatchNorm2d
        ours = hvd.SyncBatchNorm(shape[0], **options).double()
        whole = kind(shape[0], **options).double()
        if ours.affine:
            for module in (ours, whole):
                module.weight.data.copy_(torch.arange(1.0, shape[0] + 1))
        for _ in range(2):
            everyones = torch.randn(sum(rows), *shape).double().add_(100).requires_grad_()
            factors = torch.randn(sum(rows), *shape).double()
            mine = everyones.detach().split(rows)[RANK].clone().requires_grad_()
            output, expected = ours(mine), whole(everyones)
            assert_close(output, expected.split(rows)[RANK])
            (output * factors.split(rows)[RANK]).sum().backward()
            (expected * factors).sum().backward()
            assert_close(mine.grad, everyones.grad.split(rows)[RANK])
        for name, buffer in whole.named_buffers():
            assert_close(ours.get_buffer(name), buffer)
        for name, param in whole.named_parameters():
            assert_close(hvd.allreduce(ours.get_parameter(name).grad, op=hvd.Sum), param.grad)
        inputs = torch.randn(2, *shape).double()
        assert_close(ours.eval()(inputs), whole.eval()(inputs))
    too_few = "Expected more than 1 value per channel when training, got 1"
    with pytest.raises(ValueError, match=too_few):
        hvd.SyncBatchNorm(2)(torch.zeros(int(RANK == 0), 2))
    half = hvd.SyncBatchNorm(2)(torch.randn(3, 2).to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
