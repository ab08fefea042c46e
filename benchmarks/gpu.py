"""What one NVIDIA GPU can show: ``python -m benchmarks.gpu``, stages of falling value.

    NCCL_SOCKET_IFNAME=lo python -m benchmarks.gpu --budget 540 --out results

The variable is for machines without a network. ``ceilings`` tells how fast the card copies, which
kernels are held against; ``tests`` runs the tests that need a GPU, by pytest with its timeout and
xdist plugins; ``steps`` times ResNet-50 beside DDP, ``bandwidth`` replays of LAMB and LARS and the
codes of gradients.

Each stage is a process with a time limit. Its lines, JSON where they are numbers, are written to
``--out`` and printed before the next begins; a stage that fails or runs out of time stops no other.
``--budget`` bounds the whole. It needs neither network nor data, but timm and torchvision. Without
a GPU it says so and ends with exit code 77; after a stage that failed, with 1. ``--device cpu
--tiny`` walks the same way without a GPU and with a model of a few parameters.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.step import __main__ as compare
from benchmarks.step import optim
from benchmarks.turns import ROOT, parser_of, prepare
from lightning_ring.gradients.compression.between_nodes import messages
from lightning_ring.gradients.compression.blocks import shard_length
from lightning_ring.gradients.compression.int8 import INT8
from lightning_ring.gradients.compression.one_bit import SIGNS

PACKAGES = ("torch", "triton", "lightning", "torchvision", "timm", "numpy", "mpi4py")
# The files are named, since others import packages that a machine with a GPU may lack.
GPU_TESTS = (
    "tests/comm/backends/test_gloo.py",
    "tests/gpu",
    "tests/gradients/test_kernels.py",
    "tests/gradients/test_orthonormal.py",
    "tests/optim/test_triton.py",
)
JPEG_TESTS = ("tests/data/test_loader.py",)  # need simplejpeg, and are left out without it
# With `force_communication` alone would come the monitor, which is no collective.
FORCED = "force_communication=True,monitor=False"
CONTENDERS = ("ddp", f"ring:{FORCED}", f"ring_sharded:{FORCED}", "ring", "auto")


def tell(**found):
    print(json.dumps(found), flush=True)


def ceilings(device, tiny):
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    tell(python=platform.python_version(), cores=os.cpu_count(), **versions)
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        tell(card=torch.cuda.get_device_name(0), nccl=nccl, copy_gb_s=round(optim.copy_bandwidth()))
    return 0


def selection():
    """pytest's arguments that choose the tests that need a GPU."""
    jpeg = JPEG_TESTS if importlib.util.find_spec("simplejpeg") else ()
    return ["-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS, *jpeg]


def tests(device, tiny):
    command = [sys.executable, "-m", "pytest", *selection(), "-n", "8", "--timeout", "90", "-rs"]
    return subprocess.run(command, cwd=ROOT).returncode


def steps(device, tiny):
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


def bandwidth(device, tiny):
    """What share of the card's bandwidth LAMB, LARS and the codes of gradients reach."""
    copy = optim.copy_bandwidth() if device == "cuda" else 1.0
    models = {"tiny": optim.TINY} if tiny else {name: make() for name, make in optim.MODELS.items()}
    for row in optim.graph_rows(models, copy, device, num_calls=1 if tiny else 20):
        tell(**row)
    for told in code_speeds(device, 2**16 if tiny else 2**30, copy):
        tell(**told)
    return 0


def code_speeds(device, num_bytes, copy_gb_s, num_ranks=4):
    """GB/s of memory, read and written, at which a rank's whole bucket is coded, by code, and its
    share of ``copy_gb_s``. ``num_bytes`` of gradients should be many times the GPU's cache.
    ``average`` decodes the messages of all ranks for one shard.
    """
    length = shard_length(num_bytes // 4, num_ranks)
    values = torch.randn(length * num_ranks, device=device)
    for name, code in {"int8": INT8, "onebit": SIGNS}.items():
        num_message_bytes = num_ranks * code.num_bytes(length)
        sent = messages(num_ranks, code.num_bytes(length), values)
        calls = {
            "encode": (partial(code.encode, values, sent), values.nbytes),
            "decode": (partial(code.decode, sent, values), values.nbytes),
            "average": (partial(code.average, sent, values[:length]), 4 * length),
        }
        told = {"code": name, "ranks": num_ranks}
        for way, (call, num_value_bytes) in calls.items():
            call()  # compiles its kernel
            speed = (num_value_bytes + num_message_bytes) / optim.ms_of(call, device, 20) / 1e6
            told[f"{way}_gb_s"] = round(speed, 1)
            told[f"{way}_of_copy"] = round(speed / copy_gb_s, 3)
        yield told


# The limit of each in seconds.
STAGES = {ceilings: 40.0, tests: 180.0, steps: 120.0, bandwidth: 60.0}
NAMES = {stage.__name__: stage for stage in STAGES}


def run(stage, limit, asked):
    """What became of a stage in a process of its own, and its output."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--in-process", "--stages", stage]
    command += ["--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    with tempfile.TemporaryFile() as log:
        # It ends with all that it has started.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"ended after its {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


def objects(text):
    """The lines that are objects of JSON."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="models of a few parameters")
    add("--stages", nargs="+", choices=NAMES, default=list(NAMES), metavar="STAGE")
    add("--budget", type=float, default=540.0, help="seconds for all stages")
    add("--out", type=Path, help="folder for results.jsonl and log.txt")
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_process:
        return NAMES[asked.stages[0]](asked.device, asked.tiny)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use here: nothing was measured", file=sys.stderr)
        return 77  # what test harnesses take for "skipped"
    prepare()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="ring-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    until, good = time.monotonic() + asked.budget, True
    with (folder / "results.jsonl").open("w") as results, (folder / "log.txt").open("w") as log:
        for stage, limit in STAGES.items():
            name, began = stage.__name__, time.monotonic()
            if name not in asked.stages or (asked.device == "cpu" and stage is tests):
                continue
            code, text = "not run: the budget is spent", ""
            if until - began > 5.0:
                code, text = run(name, min(limit, until - began), asked)
            told = {"stage": name, "exit": code, "seconds": round(time.monotonic() - began, 1)}
            print(f"=== {json.dumps(told)}\n{text}", file=log, flush=True)
            shown = "\n".join(text.splitlines()[-30:])
            print(f"=== {json.dumps(told)}\n{shown}", flush=True)
            for found in [told, *objects(text)]:
                print(json.dumps({"stage": name} | found), file=results, flush=True)
            good = good and code == 0
    print(f"results: {folder}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
