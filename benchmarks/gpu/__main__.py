"""Everything that one NVIDIA GPU can tell: ``python -m benchmarks.gpu``, stages of falling value.

Each stage is a process with a time limit. Its lines, JSON where they are numbers, are written to
``--out`` and printed before the next begins; a stage that fails or runs out of time stops no other.
``--budget`` bounds the whole. It needs neither network nor data, and beside the dependencies of
the package: pytest with its timeout and xdist plugins, timm and torchvision. Without a GPU it says
so and ends with exit code 77; after a stage that failed, with 1.

    NCCL_SOCKET_IFNAME=lo python -m benchmarks.gpu --budget 540 --out results

The variable is for machines without a network. simplejpeg's wheel (0.4 MB) adds the loader's test.

Stages of one line of this table run side by side (they time nothing), the others alone:

| stage | proves |
|---|---|
| ceilings | versions; how fast the card copies 2 GiB, which kernels are held against |
| tests, ways | kernels, graphs, NCCL's calls; the Trainer's ways over NCCL at one rank |
| waits, ranks | a warm step never waits for the GPU; numbers of 2 to 4 ranks on a card |
| delayed | no early read, no early write, over a wire that is slow |
| steps | the reducer's cost beside that of DDP's, ResNet-50 |
| bandwidth | replays of LAMB and LARS, the codes |
| counters | why: Nsight Compute's view of LAMB's kernels |

One GPU cannot show NCCL between peers, nor how its kernels and the wire slow computation down.
``--device cpu --tiny`` walks the same way without a GPU and with a model of a few parameters, to
see that the way is open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.turns import ROOT

NO_GPU = 77  # what test harnesses take for "skipped"
# What a stage's process runs: a function of the device and of whether models are tiny.
ENTER = """
import importlib, sys
module, name, device, tiny = sys.argv[1:]
sys.exit(getattr(importlib.import_module(module), name)(device, tiny == "tiny"))
"""


@dataclass(frozen=True)
class Stage:
    """``seconds`` is its limit. Without ``cpu`` there is nothing to walk without a GPU."""

    name: str
    seconds: float
    module: str
    function: str = "main"
    cpu: bool = True


SHORT = "benchmarks.gpu.stages"
# Those of one line run side by side.
STAGES: list[list[Stage]] = [
    [Stage("ceilings", 40, SHORT, "ceilings")],
    [
        Stage("tests", 120, SHORT, "tests", cpu=False),
        Stage("ways", 120, "benchmarks.gpu.trainer_ways"),
        Stage("waits", 90, "benchmarks.gpu.no_waits"),
        Stage("ranks", 90, "benchmarks.gpu.thread_ranks"),
    ],
    [Stage("delayed", 60, "benchmarks.gpu.delayed")],
    [Stage("steps", 120, SHORT, "steps")],
    [Stage("bandwidth", 60, SHORT, "bandwidth")],
    [Stage("counters", 40, SHORT, "counters", cpu=False)],
]
NAMES = [stage.name for line in STAGES for stage in line]


def start(stage: Stage, device: str, tiny: bool, output: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    size = "tiny" if tiny else "whole"
    with output.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", ENTER, stage.module, stage.function, device, size],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it ends with all that it has started
        )


def end(process: subprocess.Popen[bytes], began: float, limit: float) -> int | str:
    """Wait until it ends, or end it at its limit; returns what became of it."""
    try:
        code: int | str = process.wait(timeout=max(began + limit - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        code = f"ended after its {limit:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def run(asked: argparse.Namespace, folder: Path) -> bool:
    """Whether no stage failed. Writes ``results.jsonl`` and ``log.txt`` in ``folder``."""
    until, good = time.monotonic() + asked.budget, True
    with (
        (folder / "results.jsonl").open("w", buffering=1) as results,
        (folder / "log.txt").open("w", buffering=1) as log,
        tempfile.TemporaryDirectory() as outputs,
    ):
        for line in STAGES:
            began, running = time.monotonic(), []
            for stage in line:
                if stage.name not in asked.stages or (asked.device == "cpu" and not stage.cpu):
                    continue
                output = Path(outputs, stage.name)
                if until - began < 5.0:
                    output.touch()
                    running.append((stage, None, output))
                else:
                    process = start(stage, asked.device, asked.tiny, output)
                    running.append((stage, process, output))
            for stage, process, output in running:
                code: int | str = "not run: the budget is spent"
                if process is not None:
                    code = end(process, began, min(stage.seconds, until - began))
                seconds = round(time.monotonic() - began, 1)
                told = {"stage": stage.name, "exit": code, "seconds": seconds}
                text = output.read_text(errors="replace")
                print(f"=== {json.dumps(told)}\n{text}", file=log)
                shown = "\n".join(text.splitlines()[-asked.lines :])
                print(f"=== {json.dumps(told)}\n{shown}", flush=True)
                for found in [told, *objects(text)]:
                    print(json.dumps({"stage": stage.name} | found), file=results)
                good = good and code == 0
    return good


def objects(text: str) -> list[dict[str, Any]]:
    """The lines that are objects of JSON."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if line.startswith("{"):
                found.append(json.loads(line))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="models of a few parameters")
    add("--stages", nargs="+", choices=NAMES, default=NAMES, metavar="STAGE")
    add("--budget", type=float, default=540.0, help="seconds for all stages")
    add("--lines", type=int, default=30, help="of each stage to print")
    add("--out", type=Path, help="folder for results.jsonl and log.txt")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use here: nothing was measured", file=sys.stderr)
        return NO_GPU
    folder = asked.out or Path(tempfile.mkdtemp(prefix="ring-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    good = run(asked, folder)
    print(f"results: {folder}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
