"""A warm backward copies nothing to the GPU that the host would have to wait for, and reads
nothing; the GPU is a fake.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_ring.gradients.compression import (
    BF16,
    DGC,
    FP16,
    Compressor,
    ErrorFeedback,
    Int8,
    OneBit,
    PowerSGD,
    TernGrad,
    TopK,
)
from lightning_ring.gradients.compression.int8 import FourBit
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sharded_gradient import sum_of_squares
from tests.fake_gpu import HostWaits, NoHostWaits, fake_gpu


def terngrad() -> TernGrad:
    compressor = TernGrad(min_numel=0)
    compressor._generator = torch.Generator()  # one of a GPU needs the driver
    return compressor


COMPRESSORS: dict[str, Callable[[], Compressor | None]] = {
    "": lambda: None,
    "fp16": FP16,
    "bf16": BF16,
    "int8": lambda: Int8(0),
    "int8, with error feedback": lambda: ErrorFeedback(Int8(0)),
    "fp16, with error feedback": lambda: ErrorFeedback(FP16()),
    "4 bits": lambda: FourBit(0),
    "onebit": lambda: OneBit(0),
    "terngrad": terngrad,
    "topk": lambda: TopK(0.1, 0),
    "dgc": lambda: DGC(0.1, warmup_steps=0, min_numel=0),
    "dgc, clipping": lambda: DGC(0.1, clip_norm=1.0, warmup_steps=0, min_numel=0),
    "powersgd": lambda: PowerSGD(rank=1, start_iter=0),
}


def backward(reducer: Reducer, net: nn.Module) -> None:
    """What autograd does, which does not run without a driver."""
    with reducer.backward():
        for param in reversed(list(net.parameters())):
            grad = torch.ones_like(param)
            param.grad = grad if param.grad is None else param.grad.add_(grad)
            del grad
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)


def train(reducer: Reducer, net: nn.Module, *, clips: bool = False) -> None:
    for step in range(4):
        for param in net.parameters():
            param.grad = None
        if step < 2:  # layout, plans and tables
            backward(reducer, net)
            continue
        with NoHostWaits():
            backward(reducer, net)
            assert all(param.grad is not None for param in net.parameters())
            reducer.agreed_to_stop()
            if clips:
                sum_of_squares(list(net.parameters()), 2)


def net_on_gpu() -> nn.Module:
    return nn.Sequential(*(nn.Linear(24, 24, device="cuda") for _ in range(4)))


@pytest.mark.parametrize(
    ("compression", "shards"),
    [
        *((name, False) for name in COMPRESSORS),
        *((name, True) for name in ("", "fp16", "bf16", "int8")),
    ],
)
def test_a_warm_backward_makes_the_host_wait_for_nothing(monkeypatch, compression, shards):
    with fake_gpu(monkeypatch) as connect:
        net = net_on_gpu()
        reducer = Reducer(
            connect(),
            net.named_parameters(),
            bucket_cap_mb=0.002,
            compressor=COMPRESSORS[compression](),
            shards=shards,
        )
        assert len(reducer.buckets) > 1
        train(reducer, net, clips=True)
        reducer.remove()


def test_averages_that_are_kept_cost_one_read(monkeypatch):
    """Ranks compare how many of them they keep; what they send for that waits for nothing."""
    with fake_gpu(monkeypatch) as connect:
        net = net_on_gpu()
        reducer = Reducer(connect(), net.named_parameters(), shards=True)
        train(reducer, net)
        with NoHostWaits(), pytest.raises(HostWaits, match="a read of a tensor"):
            backward(reducer, net)


def _index(values: Tensor) -> object:
    return values[torch.tensor([0, 1])]


@pytest.mark.parametrize(
    "wait",
    [
        lambda values: torch.tensor([1.0], device=values.device),
        lambda values: torch.ones(3).to(values.device),
        lambda values: torch.ones(3).to(values.device, non_blocking=True),
        lambda values: values.copy_(torch.ones(4)),
        lambda values: torch._foreach_copy_([values], [torch.ones(4)]),
        lambda values: values.cpu(),
        lambda values: values.sum().item(),
        lambda values: bool(values.isfinite().all()),
        lambda values: values.tolist(),
        lambda values: values.nonzero(),
        lambda values: values[values > 0],
        lambda values: values[[0, 1]],
        lambda values: torch.unique(values),
        _index,
    ],
)
def test_waits_are_found(monkeypatch, wait):
    with fake_gpu(monkeypatch):
        values = torch.ones(4, device="cuda")
        with NoHostWaits(), pytest.raises(HostWaits):
            wait(values)


def test_pinned_memory_is_sent_without_a_wait(monkeypatch):
    with fake_gpu(monkeypatch), NoHostWaits():
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        torch.ones(3, device="cuda").to("cpu", non_blocking=True)
