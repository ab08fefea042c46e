"""One run of ``lightning-ring bench`` in a rank: open the backends, measure, and report as text
and JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import lightning_ring
from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.cost import fit
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import COLLECTIVES, gpu_kind, gpu_module, is_gpu
from lightning_ring.job.job import connect
from lightning_ring.job.members import pick_gpu
from lightning_ring.job.ranks import RankInfo, discover_ranks
from lightning_ring.tools.bench import COPY, MOST_RESIDUAL
from lightning_ring.tools.bench.contenders import open_contenders
from lightning_ring.tools.bench.measure import Timing, measure

GB = 1e9
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def size_text(num_bytes: int) -> str:
    """``262144``: ``"256 KiB"``."""
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}iB"
    return f"{num_bytes} B"


def heading(collective: str, peer: str | None) -> str:
    head = f"\n{collective}\n{'size':>10}  {'backend':12} {'median µs':>11} {'least µs':>11} "
    head += f"{'p95 µs':>11} {'alg GB/s':>11} {'bus GB/s':>11} {'copy GB/s':>11}"
    return f"{head}  × {peer}" if peer else head


def timing_lines(timings: Sequence[Timing], world_size: int, peer: str | None) -> Iterator[str]:
    """One line a backend, for the timings of one collective at one size.

    With ``peer`` the last column says how many times its median each median fits into.
    """
    by_name = {timing.backend: timing for timing in timings}
    copied = by_name.pop(COPY).algorithm_bandwidth
    for name, timing in by_name.items():
        line = (
            f"{size_text(timing.num_bytes):>10}  {name:12} {1e6 * timing.median:11.1f} "
            f"{1e6 * timing.least:11.1f} {1e6 * timing.p95:11.1f} "
            f"{timing.algorithm_bandwidth / GB:11.3f} "
            f"{timing.bus_bandwidth(world_size) / GB:11.3f} {copied / GB:11.3f}"
        )
        yield f"{line}  {by_name[peer].median / timing.median:.2f}" if peer else line


def fitted_models(timings: Sequence[Timing], world_size: int) -> list[dict[str, Any]]:
    """α and β of every backend and collective (`comm.cost`), where at least two sizes were
    measured.
    """
    found = []
    medians: dict[tuple[Any, str], dict[int, float]] = defaultdict(dict)
    for one in timings:
        if one.backend != COPY:
            medians[one.collective, one.backend][one.num_bytes] = one.median
    for (collective, backend), times in medians.items():
        if len(times) > 1:
            model = fit([*times], [*times.values()], world_size, collective=collective)
            residual = max(
                abs(model.seconds(size, world_size, collective) / time - 1)
                for size, time in times.items()
            )
            about = {"collective": collective, "backend": backend, "residual": residual}
            found.append(about | asdict(model))
    return found


def model_lines(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if models:
        yield "\nmessages of the ring: α + size / B, fitted to the medians"
        yield f"{'collective':14} {'backend':12} {'α µs':>9} {'B GB/s':>9} {'residual':>9}"
    for model in models:
        yield (
            f"{model['collective']:14} {model['backend']:12} {1e6 * model['alpha_seconds']:9.1f} "
            f"{model['bandwidth'] / GB:9.3f} {model['residual']:9.0%}"
        )
    if any(model["residual"] > MOST_RESIDUAL for model in models):
        yield (
            f"warning: residuals above {MOST_RESIDUAL:.0%}: no line fits these times, and a plan "
            "from them would be wrong. Measure again on an idle machine, or fewer sizes."
        )


def bench_json(
    timings: Sequence[Timing],
    models: Sequence[Mapping[str, Any]],
    world: Mapping[str, Any],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Seconds, bytes, bytes a second throughout; a ``copy`` has the name of the collective it was
    measured beside.

    A bandwidth that does not show in the times, because they do not grow with the size, is `None`.
    """
    rows = [
        asdict(timing)
        | {
            "algorithm_bandwidth": timing.algorithm_bandwidth,
            "bus_bandwidth": timing.bus_bandwidth(world["world_size"]),
        }
        for timing in timings
    ]
    finite = [
        {**model, "bandwidth": model["bandwidth"] if math.isfinite(model["bandwidth"]) else None}
        for model in models
    ]
    return {
        "world": world,
        "versions": {
            "lightning_ring": lightning_ring.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "missing": missing,
        "timings": rows,
        "models": finite,
    }


TIMEOUT = timedelta(minutes=2)


def run(options: argparse.Namespace, sizes: Sequence[int]) -> int:
    """Measure what ``options`` (of ``cli/bench.py``) ask for at ``sizes`` in bytes. Collective;
    returns 0.

    Raises `RingError`: a backend that was asked for is not there, memory does not suffice, or a
    result is wrong.
    """
    info = discover_ranks()
    device = choose_device(options.device, info)
    job = connect(info, device, TIMEOUT)
    contenders, missing = open_contenders(job, device, options.backends or (), TIMEOUT)
    if options.compare and options.compare not in contenders:
        raise ConfigurationError(f"--compare {options.compare}: {missing[options.compare]}.")
    check_memory(max(sizes) * (len(contenders) + 2) * info.local_size, device)
    control = open_torch_communicator("gloo", WaitPolicy(TIMEOUT, job.check))
    name = gpu_module(device).get_device_name(device) if is_gpu(device) else "cpu"
    world = {"world_size": info.world_size, "num_nodes": info.num_nodes, "device": name}

    def say(*lines: str) -> None:
        if info.rank == 0 and lines:
            print(*lines, sep="\n", flush=True)

    say(f"{info.world_size} ranks on {info.num_nodes} node(s), {name}, float32, sum")
    if "auto" in contenders:
        say(f"auto, what strategy='ring' takes here: {type(contenders['auto']).__name__}")
    say(*(f"not measured: {name} ({reason})" for name, reason in missing.items()))
    timings: list[Timing] = []
    for collective in options.collectives:
        say(heading(collective, options.compare))
        for found in measure(contenders, control, device, collective, sizes, options.seconds):
            timings += found
            say(*timing_lines(found, info.world_size, options.compare))
    models = fitted_models(timings, info.world_size)
    say(*model_lines(models))
    if info.rank == 0 and options.json:
        content = bench_json(timings, models, world, missing)
        Path(options.json).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    control.barrier()  # a rank that ended now would be taken for one that failed
    for communicator in (*contenders.values(), control):
        communicator.close()
    return 0


def choose_device(asked: str, info: RankInfo) -> torch.device:
    """A GPU for each rank where there are as many, else the CPU.

    Raises `RankDiscoveryError`: ``"cuda"`` or ``"xpu"`` was asked for, and there are fewer GPUs
    than ranks on this node.
    """
    kind = asked if asked in COLLECTIVES else gpu_kind()
    there = gpu_module(torch.device(kind)).device_count() if kind else 0
    if asked == "cpu" or (asked == "auto" and there < info.local_size):
        return torch.device("cpu")
    index = pick_gpu(info.local_rank, info.local_size, there)
    gpu_module(torch.device(kind)).set_device(index)
    return torch.device(kind, index)


def check_memory(num_bytes: int, device: torch.device) -> None:
    """Of the ranks of one node together. Raises `ConfigurationError`: this host has less free
    memory.
    """
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    if num_bytes > free:
        raise ConfigurationError(
            f"the largest size takes {num_bytes / 2**30:.1f} GiB on this node, of which "
            f"{free / 2**30:.1f} GiB are free. Choose smaller --sizes, or fewer --backends."
        )
