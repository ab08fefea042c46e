"""Nsight Compute's view of LAMB's kernels over ResNet-50's parameters, once each.

``python -m benchmarks.gpu.counters`` leaves the clocks alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.parse_args()
    ncu = shutil.which("ncu")
    if ncu is None:
        print("ncu is not on the PATH: nothing was counted", file=sys.stderr)
        return 1
    sections = [word for name in SECTIONS for word in ("--section", name)]
    # the first step's kernels are left out
    names = "regex:^(scalars|measure|add_up|rates|move)$"
    kernels = ["--kernel-name", names, "--launch-skip", "10"]
    steps = [sys.executable, "-m", "benchmarks.step.optim", "--steps", "4"]
    command = [ncu, "--clock-control", "none", *sections, *kernels, "--launch-count", "5", *steps]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
