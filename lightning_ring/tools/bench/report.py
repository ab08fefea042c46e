"""What was measured, as lines of text and as JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

import lightning_ring
from lightning_ring.comm.cost import fit
from lightning_ring.tools.bench.measure import Timing
from lightning_ring.tools.bench.names import COPY

GB = 1e9
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def size_text(num_bytes: int) -> str:
    """``262144``: ``"256 KiB"``."""
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}iB"
    return f"{num_bytes} B"


def heading(collective: str, peer: str | None) -> str:
    columns = f"{'size':>10}  {'backend':12} {'median µs':>11} {'least µs':>11} {'p95 µs':>11} {'alg GB/s':>10} "
    return f"\n{collective}\n{columns}{'bus GB/s':>10} {'copy GB/s':>10}" + (f"  × {peer}" if peer else "")


def lines(timings: Sequence[Timing], world_size: int, peer: str | None) -> Iterator[str]:
    """One line a backend, for the timings of one collective at one size.

    With ``peer`` the last column says how many times its median each median fits into.
    """
    medians = {timing.backend: timing.median for timing in timings}
    copy = next(timing for timing in timings if timing.backend == COPY)
    for timing in timings:
        if timing is copy:
            continue
        micro = " ".join(f"{1e6 * value:11.1f}" for value in (timing.median, timing.least, timing.p95))
        speeds = (timing.algorithm_bandwidth, timing.bus_bandwidth(world_size), copy.algorithm_bandwidth)
        line = f"{size_text(timing.num_bytes):>10}  {timing.backend:12} {micro} "
        line += " ".join(f"{speed / GB:10.3f}" for speed in speeds)
        yield line + (f"  {medians[peer] / timing.median:.2f}" if peer else "")


def models(timings: Sequence[Timing], world_size: int) -> list[dict[str, Any]]:
    """α and β of every backend and collective (`comm.cost`), where at least two sizes were measured."""
    found = []
    for collective, backend in dict.fromkeys((t.collective, t.backend) for t in timings if t.backend != COPY):
        these = [t for t in timings if (t.collective, t.backend) == (collective, backend)]
        if len({t.num_bytes for t in these}) > 1:
            sizes, seconds = [t.num_bytes for t in these], [t.median for t in these]
            model = fit(sizes, seconds, world_size, collective=cast("Any", collective))
            found.append({"collective": collective, "backend": backend} | asdict(model))
    return found


def model_lines(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if models:
        yield "\nmessages of the ring: α + size / B, fitted to the medians"
        yield f"{'collective':14} {'backend':12} {'α µs':>9} {'B GB/s':>9}"
    for model in models:
        alpha, bandwidth = 1e6 * model["alpha_seconds"], model["bandwidth"] / GB
        yield f"{model['collective']:14} {model['backend']:12} {alpha:9.1f} {bandwidth:9.3f}"


def as_json(
    timings: Sequence[Timing], models: Sequence[Mapping[str, Any]], world: Mapping[str, Any], missing: Mapping[str, str]
) -> dict[str, Any]:
    """Seconds, bytes, bytes a second throughout; a ``copy`` has the name of the collective it was measured beside.

    A bandwidth that does not show in the times, because they do not grow with the size, is `None`.
    """
    size = world["world_size"]
    return {
        "world": dict(world),
        "versions": {
            "lightning_ring": lightning_ring.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "missing": dict(missing),
        "timings": [
            {
                "collective": timing.collective,
                "backend": timing.backend,
                "bytes": timing.num_bytes,
                "median_seconds": timing.median,
                "least_seconds": timing.least,
                "p95_seconds": timing.p95,
                "num_calls": timing.num_calls,
                "algorithm_bandwidth": timing.algorithm_bandwidth,
                "bus_bandwidth": timing.bus_bandwidth(size),
            }
            for timing in timings
        ],
        "models": [
            {**model, "bandwidth": model["bandwidth"] if math.isfinite(model["bandwidth"]) else None}
            for model in models
        ],
    }
