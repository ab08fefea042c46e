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
| delayed | what is hidden under backward, beside DDP's; no early read, no early write |
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.turns import ROOT

NO_GPU = 77  # what test harnesses take for "skipped"


@dataclass(frozen=True)
class Stage:
    """``module`` is run with ``--device`` and, if asked, ``--tiny``; ``seconds`` is its limit."""

    name: str
    seconds: float
    module: str
    cpu: bool = True  # there is something to walk without a GPU


# those of one line run side by side
STAGES: list[list[Stage]] = [
    [Stage("ceilings", 40, "benchmarks.gpu.ceilings")],
    [
        Stage("tests", 120, "benchmarks.gpu.tests", cpu=False),
        Stage("ways", 120, "benchmarks.gpu.trainer_ways"),
        Stage("waits", 90, "benchmarks.gpu.no_waits"),
        Stage("ranks", 90, "benchmarks.gpu.thread_ranks"),
    ],
    [Stage("delayed", 100, "benchmarks.gpu.delayed")],
    [Stage("steps", 120, "benchmarks.gpu.steps")],
    [Stage("bandwidth", 60, "benchmarks.gpu.bandwidth")],
    [Stage("counters", 40, "benchmarks.gpu.counters", cpu=False)],
]
NAMES = [stage.name for line in STAGES for stage in line]


@dataclass
class Running:
    """A stage's process, whose output goes to a file."""

    stage: Stage
    limit: float
    process: subprocess.Popen[bytes]
    output: Path
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, stage: Stage, limit: float, options: Sequence[str], folder: Path) -> Running:
        output = folder / f"{stage.name}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", stage.module, *options],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it ends with all that it has started
            )
        return cls(stage, limit, process, output)

    def end(self) -> dict[str, object]:
        """Wait until it ends, or end it at its limit; returns what became of it."""
        left = self.limit - (time.monotonic() - self.began)
        try:
            code: int | str = self.process.wait(timeout=max(left, 0.0))
        except subprocess.TimeoutExpired:
            code = f"ended after its {self.limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        seconds = round(time.monotonic() - self.began, 1)
        return {"stage": self.stage.name, "exit": code, "seconds": seconds}


def run(asked: argparse.Namespace, folder: Path) -> bool:
    """Whether no stage failed. Writes ``results.jsonl`` and ``log.txt`` in ``folder``."""
    until = time.monotonic() + asked.budget
    options = ["--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    good = True
    with (
        (folder / "results.jsonl").open("w", buffering=1) as results,
        (folder / "log.txt").open("w", buffering=1) as log,
        tempfile.TemporaryDirectory() as outputs,
    ):
        for line in STAGES:
            running = []
            for stage in line:
                left = until - time.monotonic()
                if stage.name not in asked.stages or (asked.device == "cpu" and not stage.cpu):
                    continue
                if left < 5.0:
                    told = {"stage": stage.name, "exit": "not run: the budget is spent"}
                    print(json.dumps(told), file=results)
                    print(json.dumps(told), flush=True)
                    good = False
                    continue
                limit = min(stage.seconds, left)
                running.append(Running.start(stage, limit, options, Path(outputs)))
            for one in running:
                told = one.end()
                text = one.output.read_text(errors="replace")
                print(f"=== {json.dumps(told)}\n{text}", file=log)
                print(json.dumps(told), file=results)
                for said in filter(is_json, text.splitlines()):
                    print(json.dumps({"stage": one.stage.name} | json.loads(said)), file=results)
                shown = "\n".join(text.splitlines()[-asked.lines :])
                print(f"=== {json.dumps(told)}\n{shown}", flush=True)
                good = good and told["exit"] == 0
    return good


def is_json(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few parameters")
    parser.add_argument("--stages", nargs="+", choices=NAMES, default=NAMES, metavar="STAGE")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all stages")
    parser.add_argument("--lines", type=int, default=30, help="of each stage to print")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and log.txt")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            "no NVIDIA GPU that torch can use on this machine: nothing was measured",
            file=sys.stderr,
        )
        return NO_GPU
    folder = asked.out or Path(tempfile.mkdtemp(prefix="ring-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    good = run(asked, folder)
    print(f"results: {folder}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
