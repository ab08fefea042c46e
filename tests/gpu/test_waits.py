"""A warm training step never makes the host wait for the GPU.

One rank trains a small network in a plain loop, all collectives running over NCCL. After three
steps torch refuses whatever waits for the GPU (`torch.cuda.set_sync_debug_mode`), and three more
follow. Left out, because they wait by design: loss scalers, which read whether a gradient is
infinite, and sparse gradients, whose sizes ranks exchange.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from lightning_ring import distribute
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, ErrorFeedback, Int8, PowerSGD
from lightning_ring.optim import LAMB, LARS
from tests.gpu import DEVICE, ON_GPU

pytestmark = ON_GPU
STEPS = 3  # to warm up, and to watch
BOTH = pytest.mark.parametrize("algorithm", [Averaging, Sharded])


def train(
    algorithm, compression=None, *, optimizer=torch.optim.SGD, dtype=torch.float32, clips=False,
    backwards=1, listens=False,
):  # fmt: skip
    """Six steps, the last three of which may not wait for the device."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).to(DEVICE, dtype)
    inputs = torch.randn(16, 256).to(DEVICE, dtype)
    built = optimizer(model.parameters(), lr=1e-3)
    # Several buckets, of which each is compressed.
    algorithm = algorithm(bucket_cap_mb=0.5, compression=compression)
    with distribute(
        model, built, algorithm=algorithm, device=DEVICE, force_communication=True
    ) as training:
        if listens:
            training.listeners.append(lambda record: None)

        def step():
            for backward in range(backwards):
                is_last = backward + 1 == backwards
                with nullcontext() if is_last else training.no_sync():
                    model(inputs).square().mean().backward()
            if clips:
                training.clip_grad_norm_(model.parameters(), max_norm=0.1)
            built.step()
            built.zero_grad()

        for _ in range(STEPS):
            step()
        with refusing_waits():
            for _ in range(STEPS):
                step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@contextmanager
def refusing_waits():
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


COMPRESSORS = {
    **{name: name for name in ("int8", "fp16", "bf16", "onebit", "terngrad", "topk")},
    "int8 with error feedback": ErrorFeedback(Int8()),
    "dgc": DGC(warmup_steps=0),
    "dgc, clipping locally": DGC(clip_norm=1.0, warmup_steps=0),
    "powersgd": PowerSGD(start_iter=0),
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressors(name):
    train(Averaging, COMPRESSORS[name])
    if name in ("int8", "fp16", "bf16"):
        train(Sharded, COMPRESSORS[name])


@BOTH
def test_features(algorithm):
    train(algorithm)
    train(algorithm, listens=True)  # as the monitor does
    train(algorithm, clips=True)
    train(algorithm, backwards=2)
    train(algorithm, "fp32", dtype=torch.bfloat16)


@BOTH
@pytest.mark.parametrize("optimizer", [LAMB, LARS, torch.optim.AdamW])
def test_optimizers(algorithm, optimizer):
    train(algorithm, optimizer=optimizer)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing waits there")
def test_a_wait_is_refused():
    with pytest.raises(RuntimeError), refusing_waits():
        torch.ones(1, device=DEVICE).item()
