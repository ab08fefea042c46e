"""Whether a warm training step makes the host wait for the GPU: ``python -m benchmarks.gpu
--stages waits``.

One rank trains a small network in a plain loop, all collectives running over NCCL, in every way.
After three steps torch is told to refuse whatever waits for the GPU
(`torch.cuda.set_sync_debug_mode`), and three more follow. On a CPU nothing is refused.

Left out, because they wait by design: loss scalers, which read whether a gradient is infinite, and
sparse gradients, whose sizes ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.checks import report
from lightning_ring import distribute
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, ErrorFeedback, Int8, PowerSGD
from lightning_ring.optim import LAMB, LARS

STEPS = 3  # to warm up, and to watch
ALGORITHMS: dict[str, type[Averaging | Sharded]] = {"ring": Averaging, "ring_sharded": Sharded}
COMPRESSORS: dict[str, Any] = {
    **{name: name for name in ("int8", "fp16", "bf16", "onebit", "terngrad", "topk")},
    "int8 with error feedback": ErrorFeedback(Int8()),
    "dgc": DGC(warmup_steps=0),
    "dgc, clipping locally": DGC(clip_norm=1.0, warmup_steps=0),
    "powersgd": PowerSGD(start_iter=0),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LAMB": LAMB,
    "LARS": LARS,
    "AdamW": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train. ``clips``: by norm; ``backwards``: of a step; ``listens``: as the monitor
    does.
    """

    algorithm: Callable[..., Algorithm]
    arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    dtype: torch.dtype = torch.float32
    clips: bool = False
    backwards: int = 1
    listens: bool = False


def ways() -> Iterator[tuple[str, Way]]:
    """Those that most depend on first."""
    yield from ((name, Way(algorithm)) for name, algorithm in ALGORITHMS.items())
    for name, compressor in COMPRESSORS.items():
        yield f"ring, {name}", Way(Averaging, {"compression": compressor})
        if name in ("int8", "fp16", "bf16"):
            yield f"ring_sharded, {name}", Way(Sharded, {"compression": name})
    for name, algorithm in ALGORITHMS.items():
        yield f"{name}, with a listener", Way(algorithm, listens=True)
        yield f"{name}, clipping", Way(algorithm, clips=True)
        yield f"{name}, accumulating", Way(algorithm, backwards=2)
        wide = Way(algorithm, {"compression": "fp32"}, dtype=torch.bfloat16)
        yield f"{name}, fp32 of bfloat16", wide
        for optimizer, build in OPTIMIZERS.items():
            yield f"{name}, {optimizer}", Way(algorithm, optimizer=build)


def train(way: Way, device: str) -> dict[str, object]:
    """Six steps, the last three of which may not wait for the device."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).to(device, way.dtype)
    inputs = torch.randn(16, 256).to(device, way.dtype)
    optimizer = way.optimizer(model.parameters(), lr=1e-3)
    # Several buckets, of which each is compressed.
    algorithm = way.algorithm(bucket_cap_mb=0.5, **way.arguments)
    with distribute(
        model, optimizer, algorithm=algorithm, device=device, force_communication=True
    ) as training:
        if way.listens:
            training.listeners.append(lambda record: None)

        def step() -> None:
            for backward in range(way.backwards):
                is_last = backward + 1 == way.backwards
                with nullcontext() if is_last else training.no_sync():
                    model(inputs).square().mean().backward()
            if way.clips:
                training.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(STEPS):
            step()
        with refusing_waits() if device == "cuda" else nullcontext():
            for _ in range(STEPS):
                step()
    if not all(bool(param.isfinite().all()) for param in model.parameters()):
        raise AssertionError("parameters are not finite")
    return {}


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Have torch raise an error where the host would wait for a CUDA device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(device: str, tiny: bool) -> int:
    return report((name, partial(train, way, device)) for name, way in ways())
