"""Whether a warm training step makes the host wait for the GPU: ``python -m
benchmarks.gpu.no_waits``.

One rank trains a small network in a plain loop, all collectives running over NCCL, in every way.
After three steps torch is told to refuse whatever waits for the GPU
(`torch.cuda.set_sync_debug_mode`), and three more follow. Prints a line of JSON for each way: "no
host waits", or the error and the line of lightning_ring that waited. ``--device cpu`` walks the
same way and refuses nothing. Exit code 1: some way waits, or failed.

Left out, because they wait by design: loss scalers, which read whether a gradient is infinite, and
sparse gradients, whose sizes ranks exchange.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_ring
from lightning_ring import distribute
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, ErrorFeedback, Int8, PowerSGD
from lightning_ring.optim import LAMB, LARS

GOOD = "no host waits"
STEPS = 3  # to warm up, and to watch


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train. ``clips``: by norm; ``backwards``: of a step; ``listens``: as the monitor
    does.
    """

    algorithm: Callable[..., Algorithm]
    arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    dtype: torch.dtype = torch.float32
    clips: bool = False
    backwards: int = 1
    listens: bool = False


def ways() -> dict[str, Way]:
    """By name, those that most depend on first."""
    algorithms = {"ring": Averaging, "ring_sharded": Sharded}
    named: dict[str, Way] = {name: Way(made) for name, made in algorithms.items()}
    compressors: dict[str, Any] = {name: name for name in ("int8", "fp16", "bf16", "onebit")}
    compressors |= {
        "int8 with error feedback": ErrorFeedback(Int8()),
        "terngrad": "terngrad",
        "topk": "topk",
        "dgc": DGC(warmup_steps=0),
        "dgc, clipping locally": DGC(clip_norm=1.0, warmup_steps=0),
        "powersgd": PowerSGD(start_iter=0),
    }
    for name, compressor in compressors.items():
        named[f"ring, {name}"] = Way(Averaging, {"compression": compressor})
        if name in ("int8", "fp16", "bf16"):
            named[f"ring_sharded, {name}"] = Way(Sharded, {"compression": name})
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "LAMB": lambda params: LAMB(params, lr=1e-3),
        "LARS": lambda params: LARS(params, lr=1e-3),
        "AdamW": torch.optim.AdamW,
    }
    for name, made in algorithms.items():
        named |= {
            f"{name}, with a listener": Way(made, listens=True),
            f"{name}, clipping": Way(made, clips=True),
            f"{name}, accumulating": Way(made, backwards=2),
            f"{name}, fp32 of bfloat16": Way(made, {"compression": "fp32"}, dtype=torch.bfloat16),
        }
        for optimizer, build in optimizers.items():
            named[f"{name}, {optimizer}"] = Way(made, optimizer=build)
    return named


def main(device: str) -> dict[str, str]:
    """What each of the `ways` did on ``device``: `GOOD`, or what went wrong. Printed too."""
    results = {}
    for name, way in ways().items():
        results[name] = outcome(way, device)
        print(json.dumps({"way": name, "told": results[name]}), flush=True)
    return results


def outcome(way: Way, device: str) -> str:
    """What ``way`` did: `GOOD`, or the error's first lines and where it was raised."""
    try:
        train(way, device)
    except Exception as error:
        return _told(error)
    return GOOD


def train(way: Way, device: str) -> None:
    """Six steps, the last three of which may not wait for the device."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).to(device, way.dtype)
    inputs = torch.randn(16, 256).to(device, way.dtype)
    optimizer = way.optimizer(model.parameters())
    # several buckets, of which each is compressed
    algorithm = way.algorithm(bucket_cap_mb=0.5, **way.arguments)
    with distribute(
        model, optimizer, algorithm=algorithm, device=device, force_communication=True
    ) as training:
        if way.listens:
            training.listeners.append(lambda record: None)

        def step() -> None:
            for number in range(way.backwards):
                is_last = number + 1 == way.backwards
                with nullcontext() if is_last else training.no_sync():
                    model(inputs).square().mean().backward()
            if way.clips:
                training.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(STEPS):
            step()
        with refusing_waits(device):
            for _ in range(STEPS):
                step()
    if not all(bool(param.isfinite().all()) for param in model.parameters()):
        raise AssertionError("parameters are not finite")


@contextmanager
def refusing_waits(device: str) -> Iterator[None]:
    """Have torch raise an error where the host would wait for a CUDA device."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _told(error: BaseException) -> str:
    lines = "\n".join(str(error).splitlines()[:3])
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(lightning_ring.__file__).parent
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    where = (ours or frames)[-1]
    place = Path(where.filename).relative_to(package.parent) if ours else where.filename
    return f"{type(error).__name__}: {lines} [{place}:{where.lineno} in {where.name}: {where.line}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.no_waits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the model is small anyway")
    results = main(parser.parse_args().device)
    sys.exit(any(result != GOOD for result in results.values()))
