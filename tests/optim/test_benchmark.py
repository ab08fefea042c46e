"""What a card is to time with ``benchmarks.step.optim`` runs here, with a few parameters."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.step import optim
from tests.processes import run


def test_graphs_report_each_optimizer_and_block() -> None:
    copy, *rows = map(json.loads, optim.graphs("cpu", tiny=True))
    assert [(row["optimizer"], row["block"]) for row in rows] == [
        (name, block) for name in ("LAMB", "LARS") for block in (1024, 2048)
    ]
    count = 64 * 64 + 64 + 1
    for row in rows:
        needed = {"LAMB": 40, "LARS": 28}[row["optimizer"]] * count
        assert row["gb_per_s"] == pytest.approx(needed / row["ms"] / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / copy["copy_gb_per_s"])


@pytest.mark.ranks
def test_the_command_line() -> None:
    command = [sys.executable, "-m", "benchmarks.step.optim", "--tiny", "--device", "cpu"]
    done = run([*command, "--host", "--graphs", "--steps", "2"], timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["host_ms"] > 0 for line in lines if "host_ms" in line] == [True, True]
    assert sum("share_of_copy" in line for line in lines) == 4
