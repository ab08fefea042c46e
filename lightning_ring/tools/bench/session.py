"""One run of ``lightning-ring bench`` in a rank: opens what is measured, measures, and says what came out."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import RankInfo, discover_ranks, pick_gpu
from lightning_ring.tools.bench import report
from lightning_ring.tools.bench.contenders import Collectives, open_contenders
from lightning_ring.tools.bench.measure import Timing, measure
from lightning_ring.tools.bench.plot import plot

TIMEOUT = timedelta(minutes=2)


def run(options: argparse.Namespace, sizes: Sequence[int]) -> int:
    """Measure what ``options`` (of ``cli/bench.py``) ask for at ``sizes`` in bytes. Collective; returns 0.

    Raises:
        RingError: A backend that was asked for is not there, memory does not suffice, or a result is wrong.
    """
    info = discover_ranks()
    device = choose_device(options.device, info)
    job = connect(info, device, TIMEOUT)
    contenders, missing = open_contenders(job, device, options.backends or (), TIMEOUT)
    if options.compare and options.compare not in contenders:
        raise ConfigurationError(f"--compare {options.compare}: {missing[options.compare]}.")
    check_memory(max(sizes) * (len(contenders) + 2) * info.local_size, device)
    control = open_torch_communicator("gloo", WaitPolicy(TIMEOUT, job.check))
    world = {"world_size": info.world_size, "num_nodes": info.num_nodes, "device": device_name(device)}
    if info.rank == 0:
        print(f"{info.world_size} ranks on {info.num_nodes} node(s), {world['device']}, float32, sum", flush=True)
        if "auto" in contenders:
            print(f"auto, what strategy='ring' takes here: {type(contenders['auto']).__name__}", flush=True)
        for name, reason in missing.items():
            print(f"not measured: {name} ({reason})", flush=True)
    timings = measure_and_print(contenders, control, device, options, sizes)
    models = report.models(timings, info.world_size)
    if info.rank == 0:
        print(*report.model_lines(models), sep="\n", flush=True)
        if options.json is not None:
            Path(options.json).write_text(
                json.dumps(report.as_json(timings, models, world, missing), indent=1, allow_nan=False) + "\n"
            )
        if options.plot is not None:
            plot(timings, info.world_size, options.plot)
    control.barrier()  # a rank that ended now would be taken for one that failed
    for communicator in (*contenders.values(), control):
        communicator.close()
    return 0


def measure_and_print(
    contenders: dict[str, Collectives],
    control: Communicator,
    device: torch.device,
    options: argparse.Namespace,
    sizes: Sequence[int],
) -> list[Timing]:
    found: list[Timing] = []
    for collective in options.collectives:
        if control.rank == 0:
            print(report.heading(collective, options.compare), flush=True)
        for timings in measure(contenders, control, device, collective, sizes, options.seconds):
            found += timings
            if control.rank == 0:
                print(*report.lines(timings, control.world_size, options.compare), sep="\n", flush=True)
    return found


def choose_device(asked: str, info: RankInfo) -> torch.device:
    """A GPU for each rank where there are as many, else the CPU.

    Raises:
        RankDiscoveryError: ``"cuda"`` was asked for, and there are fewer GPUs than ranks on this node.
    """
    there = torch.cuda.device_count()
    if asked == "cpu" or (asked == "auto" and there < info.local_size):
        return torch.device("cpu")
    index = pick_gpu(info.local_rank, info.local_size, there, os.environ.get("CUDA_VISIBLE_DEVICES"))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def check_memory(num_bytes: int, device: torch.device) -> None:
    """Of the ranks of one node together.

    Raises:
        ConfigurationError: This host has less free memory.
    """
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    if num_bytes > free:
        raise ConfigurationError(
            f"the largest size takes {num_bytes / 2**30:.1f} GiB on this node, of which {free / 2**30:.1f} GiB are "
            "free. Choose a smaller --max, or fewer --backends."
        )
