"""The short stages of `benchmarks.gpu`: each prints what it finds, and returns its exit code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.comm.compression import code_speeds
from benchmarks.step import __main__ as compare
from benchmarks.step import optim
from benchmarks.turns import ROOT

PACKAGES = ("torch", "triton", "lightning", "torchvision", "timm", "numpy", "mpi4py")
# The files are named, since others import packages that a machine with a GPU may lack. The test of
# the Trainer's ways is left out: a stage of its own runs them.
GPU_TESTS = (
    "tests/comm/backends/test_gloo.py",
    "tests/gradients/test_kernels.py",
    "tests/gradients/test_orthonormal.py",
    "tests/optim/test_triton.py",
)
JPEG_TESTS = ("tests/data/test_loader.py",)  # need simplejpeg, and are left out without it
# With `force_communication` alone would come the monitor, which is no collective.
FORCED = "force_communication=True,monitor=False"
CONTENDERS = ("ddp", f"ring:{FORCED}", f"ring_sharded:{FORCED}", "ring", "auto")
LAMB_KERNELS = "regex:^(scalars|measure|add_up|rates|move)$"
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")


def tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


def ceilings(device: str, tiny: bool) -> int:
    """What this GPU and its software are, how fast it copies, and that NCCL sums."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    tell(python=platform.python_version(), cores=os.cpu_count(), **versions)
    if device == "cpu":
        return 0
    card, gpu = torch.cuda.get_device_properties(0), torch.device("cuda", 0)
    tell(card=card.name, memory_gib=round(card.total_memory / 2**30, 1))
    tell(processors=card.multi_processor_count, copy_gb_s=round(optim.copy_bandwidth()))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=gpu)
    ones = torch.ones(4, device=gpu)
    dist.all_reduce(ones)
    tell(nccl=".".join(map(str, torch.cuda.nccl.version())), sums=ones.tolist())
    dist.destroy_process_group()
    return 0


def steps(device: str, tiny: bool) -> int:
    """What the reducer costs beside DDP's: ResNet-50, bf16-mixed, channels-last.

    A ring of one rank leaves its collectives out: only the forced one is compared with DDP, whose
    reducer always runs. At a batch of 256 the GPU is the limit; at a batch of 8 small images the
    host is, and the time of a step is what the host needs for one.
    """
    options = ["--device", device]
    rows = {"batch 256": ["--batch", "256"], "batch 8": ["--batch", "8", "--image", "64"]}
    row = compare.Row("resnet50", CONTENDERS, ranks=1, steps=10, rounds=6, by_turn=True)
    if device == "cuda":
        row = replace(row, start="exec")
    if tiny:
        rows, row = {"tiny": []}, replace(row, model="tiny", steps=2, rounds=1)
    else:
        options += ["--precision", "bf16-mixed", "--channels-last"]
    for name, more in rows.items():
        seconds, facts = compare.measure(row, [*options, *more])
        print(*compare.report(row, seconds, facts), sep="\n", flush=True)
        for contender, times in seconds.items():
            ratio, low, high = compare.ratio_of_turns(times, seconds["ddp"], row.steps)
            ms = 1e3 * statistics.median(times)
            tell(row=name, contender=contender, ms=ms, of_ddp=ratio, low=low, high=high)
    return 0


def bandwidth(device: str, tiny: bool) -> int:
    """What share of the card's bandwidth LAMB, LARS and the codes of gradients reach."""
    copy = optim.copy_bandwidth() if device == "cuda" else 1.0
    tell(copy_gb_s=round(copy))
    models = {"tiny": optim.TINY} if tiny else {name: make() for name, make in optim.MODELS.items()}
    for row in optim.graph_rows(models, copy, device, num_calls=1 if tiny else 20):
        tell(**row)
    first, num_steps = next(iter(models.values())), 3 if tiny else 300
    for name in optim.SETTINGS:
        tell(optimizer=name, host_ms=optim.host_ms(name, first, device, num_steps))
    for told in code_speeds(device, 2**16 if tiny else 2**30, copy):
        tell(**told)
    return 0


def selection() -> list[str]:
    """pytest's arguments that choose the tests that need a GPU."""
    jpeg = JPEG_TESTS if importlib.util.find_spec("simplejpeg") else ()
    return ["-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS, *jpeg]


def tests(device: str, tiny: bool) -> int:
    command = [sys.executable, "-m", "pytest", *selection(), "-n", "8", "--timeout", "90", "-rs"]
    return subprocess.run(command, cwd=ROOT).returncode


def counters(device: str, tiny: bool) -> int:
    """Nsight Compute's view of LAMB's kernels over ResNet-50's parameters, once each. It leaves the
    clocks alone.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not on the PATH: nothing was counted", file=sys.stderr)
        return 1
    sections = [word for name in SECTIONS for word in ("--section", name)]
    # The first step's kernels are left out.
    kernels = ["--kernel-name", LAMB_KERNELS, "--launch-skip", "10", "--launch-count", "5"]
    lamb = [sys.executable, "-m", "benchmarks.step.optim", "--steps", "4"]
    command = [ncu, "--clock-control", "none", *sections, *kernels, *lamb]
    return subprocess.run(command).returncode
