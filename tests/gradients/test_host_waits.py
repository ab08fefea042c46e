"""A warm step copies nothing to or from the GPU that the host would have to wait for; the GPU is a
fake.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, FP16, ErrorFeedback, Int8, TernGrad
from lightning_ring.gradients.sharded_gradient import sum_of_squares
from tests.compressors import COMPRESSORS
from tests.fake_gpu import HostWaits, NoHostWaits, fake_gpu


class WithoutDriver(TernGrad):
    def all_reduce(self, *args, **kwargs):
        self._generator = self._generator or torch.Generator()  # one of a GPU needs the driver
        return super().all_reduce(*args, **kwargs)


WITH_MORE = COMPRESSORS | {
    "int8 with error feedback": lambda: ErrorFeedback(Int8(0)),
    "fp16 with error feedback": lambda: ErrorFeedback(FP16()),
    "terngrad": lambda: WithoutDriver(min_numel=0),
    "dgc, clipping": lambda: DGC(0.1, clip_norm=1.0, warmup_steps=0, min_numel=0),
}
CAN_SHARD = ("none", "fp16", "bf16", "int8")


def ring(compression="none"):
    return Averaging(bucket_cap_mb=0.002, compression=WITH_MORE[compression]())


def ring_sharded(compression="none"):
    return Sharded(bucket_cap_mb=0.002, compression=WITH_MORE[compression]())


WAYS = {
    **{f"ring, {name}": partial(ring, name) for name in WITH_MORE},
    **{f"ring_sharded, {name}": partial(ring_sharded, name) for name in CAN_SHARD},
}


def net_on_gpu():
    return nn.Sequential(*(nn.Linear(24, 24, device="cuda") for _ in range(4)))


def backward(algorithm, net):
    """What autograd does, which does not run without a driver."""
    with algorithm.backward():
        for param in reversed(list(net.parameters())):
            grad = torch.ones_like(param)
            param.grad = grad if param.grad is None else param.grad.add_(grad)
            del grad
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)


def step(algorithm, net, optimizer):
    algorithm.begin_batch()
    with algorithm.forward():
        net(torch.ones(2, 24, device="cuda"))
    backward(algorithm, net)
    assert all(param.grad is not None for param in net.parameters())
    sum_of_squares(list(net.parameters()), 2)
    algorithm.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    algorithm.agreed_to_stop()


def train(algorithm, net, comm):
    """Two steps that may wait, for layout and tables, and two that may not."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm.attach(net, [optimizer], comm)
    for number in range(4):
        with NoHostWaits() if number > 1 else nullcontext():
            step(algorithm, net, optimizer)
            if number < 3:
                optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_step_makes_the_host_wait_for_nothing(monkeypatch, way):
    with fake_gpu(monkeypatch) as connect:
        net, algorithm = net_on_gpu(), WAYS[way]()
        train(algorithm, net, connect())
        assert len(algorithm.reducer.buckets) > 1
        algorithm.detach()


def test_averages_that_are_kept_cost_one_read(monkeypatch):
    """Ranks compare how many of them they keep; what they send for that waits for nothing."""
    with fake_gpu(monkeypatch) as connect:
        net, algorithm = net_on_gpu(), ring_sharded()
        train(algorithm, net, connect())
        with NoHostWaits(), pytest.raises(HostWaits, match="a read of a tensor"):
            backward(algorithm, net)


@pytest.mark.parametrize(
    "wait",
    [
        lambda values: torch.ones(3).to(values.device),
        lambda values: torch.ones(3).to(values.device, non_blocking=True),
        lambda values: values.copy_(torch.ones(4)),
        lambda values: torch._foreach_copy_([values], [torch.ones(4)]),
        lambda values: values.cpu(),
        lambda values: values.sum().item(),
        lambda values: values.nonzero(),
        lambda values: values[values > 0],
        lambda values: values[[0, 1]],
        lambda values: torch.where(values > 0, values, torch.tensor(0.0)),
    ],
)
def test_waits_are_found(monkeypatch, wait):
    with fake_gpu(monkeypatch):
        values = torch.ones(4, device="cuda")
        with NoHostWaits(), pytest.raises(HostWaits):
            wait(values)
