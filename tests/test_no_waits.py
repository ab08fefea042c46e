"""The program that asks torch on a GPU whether steps make the host wait, on the CPU."""

from __future__ import annotations

import json
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
def test_a_way_that_fails_is_named_with_its_line_and_hides_no_other() -> None:
    result = run([sys.executable, "-c", BROKEN])
    assert result.returncode == 0, result.stdout
    broken, ring = (json.loads(line) for line in result.stdout.splitlines()[-2:])
    assert broken["told"].startswith("ValueError: called a synchronizing CUDA operation")
    assert "[lightning_ring/gradients/delivery.py:" in broken["told"]
    assert ring == {"way": "ring", "told": "no host waits"}
