"""Nsight Compute's view of LAMB's kernels over ResNet-50's parameters, once each.

``python -m benchmarks.gpu.counters`` runs itself under ``ncu``. It leaves the clocks alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from benchmarks.step import optim
from lightning_ring.optim import LAMB

SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")


def steps() -> None:
    optimizer = LAMB(optim.make_params(optim.MODELS["resnet50"](), "cuda"), lr=1e-4)
    for _ in range(3):
        optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--steps", action="store_true", help="what is profiled")
    asked = parser.parse_args()
    if asked.steps:
        steps()
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not on the PATH: nothing was counted", file=sys.stderr)
        return 1
    sections = [word for name in SECTIONS for word in ("--section", name)]
    # three launches a step; the first step's are left out
    kernels = ["--kernel-name", "regex:measure|add_up|move", "--launch-skip", "3"]
    kernels += ["--launch-count", "3"]
    command = [ncu, "--clock-control", "none", *sections, *kernels]
    return subprocess.run(
        [*command, sys.executable, "-m", "benchmarks.gpu.counters", "--steps"]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
