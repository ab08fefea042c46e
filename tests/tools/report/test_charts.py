"""Line charts: long lines keep extremes, values that are not finite count nowhere else, lines
follow their runs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_ring.tools.report.charts import bar_chart, intervals, line_chart


def test_a_long_line_is_drawn_by_means_and_keeps_its_extremes() -> None:
    points = np.array([(float(step), 2.0 * step) for step in range(20_000)])
    points[7_001, 1], points[9_003, 1], points[:100, 1] = 1e6, math.inf, math.nan
    x, middle, low, high = intervals(points)
    assert len(x) == len(middle) == len(low) == len(high) == 200
    assert np.nanmax(high) == 1e6
    assert np.isnan(middle[0])
    assert middle[1] == pytest.approx(2.0 * x[1])
    assert np.isfinite(middle[1:]).all()
    assert len(intervals(points[:200])[0]) == 200


@pytest.mark.parametrize("low", [0.0, -3.0, 1e-30, 1e9])
@pytest.mark.parametrize("size", [0.0, 1e-9, 0.7, 1.0, 1e30])
@pytest.mark.parametrize("log", [False, True])
def test_extreme_values_are_drawn(low: float, size: float, log: bool) -> None:
    chart = line_chart("loss", {0: [(0, low), (1, low + size)]}, "step", log=log)
    assert 'class="run-0"' in chart
    assert "nan" not in chart.lower()


def test_steps_and_ranks_have_whole_ticks() -> None:
    chart = line_chart("ring/world_size", {0: [(0, 3.0), (1, 2.0)]}, "step")
    assert ">2.5<" not in chart
    assert ">0.5<" not in chart
    assert ">3<" in chart


def test_bars_have_the_colours_of_their_parts() -> None:
    chart = bar_chart([("run <a>", {"forward": 1.0, "data": 2.0})], {"forward": 0, "data": 3})
    assert "var(--c0)" in chart
    assert "var(--c3)" in chart
    assert "run &lt;a&gt;" in chart
