"""PowerSGD: against torch's own hook, and what it keeps between steps."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import Parameter
from torch.testing import assert_close

from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import PowerSGD
from lightning_ring.gradients.delivery import average_compressed_, prepare_compressed
from tests.checks.compression.ways import (
    assert_same_bits,
    average,
    gradients,
    make,
    parameters,
    send,
)
from tests.checks.world import communicator, open_gloo


def check_a_step_that_is_not_finite_leaves_no_trace_in_powersgd():
    compressor = PowerSGD(start_iter=0)
    reducer, params = make(compressor)
    mine = gradients(communicator().rank)
    send(reducer, params, mine)
    before = {name: compressor.residual(name).clone() for name, _ in parameters()}
    assert sum(residual.norm() for residual in before.values()) > 0
    broken = [g.clone() for g in mine]
    if communicator().rank == 0:
        broken[0][3, 3] = torch.inf
    got = send(reducer, params, broken)
    assert not got[0].isfinite().any()
    assert_same_bits(*got)
    for name, residual in before.items():
        assert torch.equal(compressor.residual(name), residual), name
    for _ in range(3):
        got = send(reducer, params, mine)
        assert all(grad.isfinite().all() for grad in got)


def check_powersgd_original_is_sent_and_error():
    comm = communicator()
    compressor = PowerSGD(rank=2, start_iter=1)
    reducer, params = make(compressor)
    names = [name for name, _ in parameters()]
    for step in range(5):
        mine = gradients(comm.rank, step)
        before = {name: as_rows(compressor.residual(name)) for name in ("matrix", "conv")}
        got = send(reducer, params, mine)
        if step == 0:  # whole
            wanted = average(step)
            assert all(
                torch.allclose(g.double(), w, atol=1e-6) for g, w in zip(got, wanted, strict=True)
            )
        for name in before:
            index = names.index(name)
            original = as_rows(mine[index]) + before[name]
            sent = as_rows(got[index])
            error = as_rows(compressor.residual(name))
            if step == 0:
                assert not error.any()
                continue
            assert_close(sent + error, original, rtol=1e-5, atol=1e-6)
            assert torch.linalg.matrix_rank(sent.double(), rtol=1e-5) <= 2
        assert not any(compressor.residual(name).any() for name in ("vector", "scalar"))


def as_rows(gradient):
    """The gradient of a weight as PowerSGD sees it: a row an output, in the order of memory."""
    order = (0, 2, 3, 1) if gradient.dim() == 4 else (0, 1)
    return gradient.permute(order).reshape(gradient.shape[0], -1).clone()


class HookBucket:
    """What torch's hook asks of a `GradBucket`, which has no constructor."""

    def __init__(self, flat, views):
        self._flat, self._views = flat, views

    def buffer(self):
        return self._flat

    def index(self):
        return 0

    def gradients(self):
        return self._views

    def is_last(self):
        return True


def check_powersgd_equals_torchs_hook():
    """The same factors in, the same gradients and errors out, over several steps with warm
    start.
    """
    open_gloo()
    comm = communicator()
    group = dist.new_group(backend="gloo")
    weights = [
        (f"w{i}", Parameter(torch.zeros(shape)))
        for i, shape in enumerate([(16, 8, 3, 3), (20, 30), (9,)])
    ]
    compressor = PowerSGD(rank=2, start_iter=0)
    bucket = Bucket([name for name, _ in weights], [param for _, param in weights])
    prepare_compressed(bucket, compressor)
    state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    plan = compressor.compressor._plans[bucket.gradients]
    state.q_memory_dict[0] = plan.second.clone()
    state.p_memory_dict[0] = torch.zeros(sum(matrix.p.numel() for matrix in plan.matrices))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        for _, param in weights:
            param.grad = torch.randn(param.shape, generator=generator)
        flat = torch.cat([param.grad.reshape(-1) for _, param in weights])
        sizes = [param.numel() for _, param in weights]
        views = [
            part.view_as(param) for part, (_, param) in zip(flat.split(sizes), weights, strict=True)
        ]
        powerSGD_hook(state, HookBucket(flat, views)).wait()
        bucket.fill([True] * 3, stop=False)
        compressor.begin_backward()
        average_compressed_(bucket, compressor, comm, None, "bucket").wait()
        for ours, theirs in zip(bucket.views, views, strict=True):
            assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        errors = torch.cat(
            [compressor.residual(matrix.name).reshape(-1) for matrix in plan.matrices]
        )
        assert_close(errors, state.error_dict[0][: errors.numel()], rtol=1e-4, atol=1e-4)
