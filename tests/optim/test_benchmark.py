"""What a card is to time with ``benchmarks.step.optim`` runs here, with a few parameters."""

from __future__ import annotations

import pytest

from benchmarks.step import optim


def test_graphs_report_each_optimizer() -> None:
    rows = list(optim.graph_rows({"tiny": optim.TINY}, 10.0, "cpu", num_calls=1))
    assert [row["optimizer"] for row in rows] == ["LAMB", "LARS"]
    count = 64 * 64 + 64 + 1
    for row in rows:
        needed = {"LAMB": 40, "LARS": 28}[row["optimizer"]] * count
        assert row["gb_per_s"] == pytest.approx(needed / row["ms"] / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / 10)
    assert optim.copy_bandwidth("cpu", 1 << 20) > 0


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_the_host_is_timed(name: str) -> None:
    assert 0 < optim.host_ms(name, optim.TINY, num_steps=3) < 1000
