"""Ranks are killed in the middle of collectives; the others open the next generation, and go on (`summing_rank.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import ROOT, elastic_command, run

RANK = str(ROOT / "tests" / "elastic" / "summing_rank.py")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]


@pytest.mark.parametrize(("backend", "name"), [("auto", "SharedMemoryCommunicator"), ("gloo", "GlooCommunicator")])
def test_survivors_of_deaths_within_collectives_go_on(backend: str, name: str, tmp_path: Path) -> None:
    # in the middle of a step; the next rank 0, before a step's first collective; while others enter the commit barrier
    deaths = ["1:5:2", "0:9:0", "2:13:3"]
    done = run(elastic_command(4, RANK, str(tmp_path), backend, "20", *deaths), timeout=120)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "generation 3: 1 ranks, after 13 steps" in done.stdout
    (result,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    # a single rank needs no other's memory, and takes what an ordinary job of one rank takes
    assert result["communicators"][:3] == [name] * 3
    assert result["default"] == [6.0, 5.0, 5.0, 3.0]
    if backend == "auto":
        assert max(result["reserving"][1:3]) < result["reserving"][0] / 2, result["reserving"]
