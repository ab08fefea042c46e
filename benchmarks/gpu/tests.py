"""The tests that need a GPU: ``python -m benchmarks.gpu.tests``. Ends with pytest's exit code.

The files are named, since others of ``tests`` import packages that a machine with a GPU may lack.
The test of the Trainer's ways is left out: `benchmarks.gpu.trainer_ways` is what it runs.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks.turns import ROOT

GPU_TESTS = (
    "tests/comm/backends/test_gloo.py",
    "tests/gradients/test_kernels.py",
    "tests/gradients/test_orthonormal.py",
    "tests/optim/test_triton.py",
)
# These need simplejpeg too, and are left out without it.
JPEG_TESTS = ("tests/data/test_loader.py",)


def selection() -> list[str]:
    """pytest's arguments that choose the tests."""
    jpeg = JPEG_TESTS if importlib.util.find_spec("simplejpeg") else ()
    return ["-m", "gpu", "-q", "-p", "no:cacheprovider", *GPU_TESTS, *jpeg]


def main(workers: int = 8) -> int:
    options = ["-n", str(workers), "--timeout", "90", "-rs"]
    command = [sys.executable, "-m", "pytest", *selection(), *options]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
