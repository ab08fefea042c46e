"""``recipes/scaling.py``: the table, and a real run whose target ends it."""

from __future__ import annotations

import sys

import pytest

import recipes.scaling
from recipes.scaling import Run, table
from tests.processes import ROOT, run


def test_table_compares_with_the_first_run_and_with_what_was_published():
    runs = [Run(1, 10, 100, 80.0, {"test/accuracy": 0.98}), Run(4, 10, 100, 25.0, {"test/accuracy": 0.97})]
    lines = table(runs, published=True).splitlines()
    assert lines[2] == "| 1 | 10 | 100 | 80.0 s | 1.00 | 100 % | 0.9800 | 78 min, 1.00 |"
    assert lines[3] == "| 4 | 10 | 100 | 25.0 s | 3.20 | 80 % | 0.9700 | 23 min, 3.39 |"
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert "min" not in table(runs)  # another experiment's numbers are compared with nothing


def test_ranks_that_share_cores_are_told(monkeypatch):
    monkeypatch.setattr(recipes.scaling, "available_cores", lambda: 2)
    runs = [Run(devices, 1, 1, 1.0, {}) for devices in (1, 4)]
    assert "share 2 cores" in table(runs)
    assert "share" not in table(runs[:1])


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_target_ends_a_run_before_its_last_epoch(tmp_path):
    options = ["experiment=digits", "--devices", "1", "--target", "0.5", "--folder", str(tmp_path)]
    result = run([sys.executable, str(ROOT / "recipes" / "scaling.py"), *options, "trainer.max_epochs=50"], timeout=180)
    assert result.returncode == 0, result.stdout
    devices, epochs = (tmp_path / "scaling.md").read_text().splitlines()[2].split(" | ")[:2]
    assert devices == "| 1"
    assert 1 <= int(epochs) < 20
