"""A plain loop whose ranks are killed at every point: survivors have one history, and the bits
of a fresh job.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, elastic_command, run

RANK = str(ROOT / "tests" / "elastic" / "training_rank.py")
TORTURE = str(ROOT / "tests" / "membership" / "torture.py")
pytestmark = pytest.mark.ranks


def check_one_history(folder: Path, steps: int) -> tuple[int, str]:
    """Whatever process finished a step had the same weights then. Returns the last position and
    digest.
    """
    history: dict[int, tuple[int, str]] = {}
    for log in folder.glob("*.log"):
        for step, position, digest in map(json.loads, log.read_text().splitlines()):
            assert history.setdefault(step, (position, digest)) == (position, digest), (
                log.name,
                step,
            )
    assert sorted(history) == list(range(1, steps + 1))
    return history[steps]


def check_against_a_fresh_job(folder: Path, backend: str, steps: int, end: tuple[int, str]) -> None:
    """A job of the last view's ranks, from the state that this view began with, ends with the
    same bits.
    """
    world_size = torch.load(folder / "state.pt")["world_size"]
    fresh = folder / "fresh"
    fresh.mkdir()
    rank = [RANK, str(fresh), backend, str(steps), "--from", str(folder / "state.pt")]
    done = run(elastic_command(world_size, *rank))
    assert done.returncode == 0, done.stdout[-4000:]
    for log in fresh.glob("*.log"):
        assert json.loads(log.read_text().splitlines()[-1]) == [steps, *end]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize(
    "deaths",
    [
        ["1:5:forward", "2:5:2", "0:9:7"],  # two at once, then rank 0 in the middle of backward
        [
            "3:3:commit",
            "1:3:recovery",
            "0:8:step",
        ],  # one more while the others recover; one that has passed the barrier
    ],
)
def test_deaths_within_a_step(backend: str, deaths: list[str], tmp_path: Path) -> None:
    rank = [RANK, str(tmp_path), backend, "14", "--die", *deaths]
    done = run(elastic_command(5, *rank))
    assert done.returncode == 0, done.stdout[-4000:]
    end = check_one_history(tmp_path, 14)
    assert torch.load(tmp_path / "state.pt")["world_size"] == 2
    check_against_a_fresh_job(tmp_path, backend, 14, end)


@pytest.mark.skipif(
    "RING_TORTURE" not in os.environ, reason="minutes of random kills: RING_TORTURE=1"
)
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_and_newcomers(seed: int, tmp_path: Path) -> None:
    backend = ["auto", "gloo"][seed % 2]
    rank = [RANK, str(tmp_path), backend, "120", "--seconds", "0.05"]
    done = run([sys.executable, TORTURE, str(seed), str(tmp_path), *rank], timeout=250)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "was killed by signal 9" in done.stdout
    check_one_history(tmp_path, 120)
