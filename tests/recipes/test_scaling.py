"""``recipes/scaling.py``: the table, and a real run whose target ends it."""

from __future__ import annotations

import re
import sys

import pytest

import recipes.scaling
from recipes.scaling import Run, table
from tests.processes import ROOT, run


def runs(devices, *seconds, accuracy=0.98):
    return [Run(devices, 10, 100, value, {"test/accuracy": accuracy}) for value in seconds]


def test_table_compares_medians_with_the_first():
    of = runs(1, 80.0, 82.0, 79.0) + runs(4, 25.0, 26.0, 24.5, accuracy=0.97)
    lines = table(of).splitlines()
    assert lines[2] == "| 1 | 3 | 10 | 100 | 80 (79 to 82) s | 1.00 | 100 % | 0.9800 |"
    assert (
        lines[3]
        == "| 4 | 3 | 10 | 100 | 25 (24.5 to 26) s | 3.20 (3.04 to 3.35) | 80 % (76 % to 84 %) | "
        "0.9700 |"
    )
    assert len({line.count("|") for line in lines[:4]}) == 1


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (runs(1, 9.0) + runs(2, 2.9), "it takes 3 runs of each number of devices"),
        (
            runs(1, 9.0, 6.0, 5.9) + runs(2, 3.0, 3.0, 3.0),
            "the runs on 1 device.* differ by 52 %, more than 10 %",
        ),
        (
            runs(1, 6.0, 6.0, 6.0) + runs(2, 3.0, 3.4, 3.0),
            "the runs on 2 device.* differ by 13 %, more than 10 %",
        ),
    ],
)
def test_a_ratio_that_the_runs_do_not_support_is_not_printed(of, reason):
    text = table(of)
    assert re.search(f"No speed-up: {reason}", text)
    assert "%" not in text.splitlines()[3]
    assert " | - | - | " in text.splitlines()[3]


def test_ranks_that_share_cores_are_told(monkeypatch):
    monkeypatch.setattr(recipes.scaling, "available_cores", lambda: 2)
    few = [Run(devices, 1, 1, 1.0, {}) for devices in (1, 4)]
    assert "share 2 cores" in table(few)
    assert "share" not in table(few[:1])


@pytest.mark.ranks
def test_target_ends_a_run_before_its_last_epoch(tmp_path):
    options = [
        "experiment=digits",
        "--devices",
        "1",
        "--target",
        "0.5",
        "--repeats",
        "1",
        "--folder",
        str(tmp_path),
    ]
    result = run(
        [sys.executable, str(ROOT / "recipes" / "scaling.py"), *options, "trainer.max_epochs=50"]
    )
    assert result.returncode == 0, result.stdout
    devices, repeats, epochs = (
        (tmp_path / "scaling.md").read_text().splitlines()[2].split(" | ")[:3]
    )
    assert (devices, repeats) == ("| 1", "1")
    assert (tmp_path / "warm_up").is_dir()
    assert 1 <= int(epochs) < 20
