"""The program that asks torch on a GPU whether steps make the host wait, on the CPU."""

from __future__ import annotations

import sys

import pytest

from tests.processes import run

BROKEN = """
from benchmarks.gpu import no_waits
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import FP32

class Broken(FP32):
    def accepts(self, dtype):
        return True
    def all_reduce(self, flat, comm, *, lost=None, name=""):
        raise ValueError("called a synchronizing CUDA operation")

broken = no_waits.Way(Averaging, {"compression": Broken()})
ways = {"broken": broken, "ring": no_waits.ways()["ring"]}
no_waits.ways = lambda: ways
assert no_waits.main("cpu").keys() == ways.keys()
"""


@pytest.mark.ranks
def test_every_way_is_walked_on_the_cpu() -> None:
    result = run([sys.executable, "-m", "benchmarks.gpu.no_waits", "--device", "cpu"])
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if line.endswith(": no host waits")]
    assert len(lines) > 20
    assert "ring_sharded, int8: no host waits" in lines


@pytest.mark.ranks
def test_a_way_that_fails_is_named_with_its_line_and_hides_no_other() -> None:
    result = run([sys.executable, "-c", BROKEN])
    assert result.returncode == 0, result.stdout
    broken, ring = result.stdout.splitlines()[-2:]
    assert broken.startswith("broken: ValueError: called a synchronizing CUDA operation")
    assert "[lightning_ring/gradients/delivery.py:" in broken
    assert ring == "ring: no host waits"
