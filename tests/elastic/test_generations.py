"""Ranks are killed in the middle of collectives; the others open the next generation, and go on
(`summing_rank.py`).
"""

import json

import pytest

from tests.processes import ROOT, elastic_command, run

RANK = str(ROOT / "tests" / "elastic" / "summing_rank.py")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]


def job(folder, backend, *deaths):
    """What the launcher said, and the result of the one rank of four that is left."""
    done = run(elastic_command(4, RANK, str(folder), backend, "20", *deaths))
    assert done.returncode == 0, done.stdout[-4000:]
    (result,) = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return done.stdout, result


def test_survivors_of_deaths_within_collectives_go_on(tmp_path):
    # in the middle of a step; the next rank 0, before a step's first collective; while others enter
    # the commit barrier
    said, result = job(tmp_path, "auto", "1:5:2", "0:9:0", "2:13:3")
    assert "generation 3: 1 rank, after 13 steps" in said
    # a single rank needs no other's memory, and takes what an ordinary job of one rank takes
    assert result["communicators"][:3] == ["SharedMemoryCommunicator"] * 3
    assert result["default"] == [6.0, 5.0, 5.0, 3.0]
    first, second, third, _ = result["segments"]
    assert {*first} & {*second}, f"memory serves the next generation: {result['segments']}"
    assert {*second} & {*third}, result["segments"]


def test_survivors_of_deaths_while_gloo_connects_go_on(tmp_path):
    said, result = job(tmp_path, "gloo", "2:0:open", "1:5:2", "0:9:0")
    assert "generation 3: 1 rank, after 9 steps" in said
    assert result["communicators"][:2] == ["GlooCommunicator"] * 2
    assert result["default"] == [4.0, 3.0, 3.0]
    assert max(result["opening"]) < 10, result["opening"]  # Gloo alone waits for 50 s
