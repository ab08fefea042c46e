"""Line charts: long lines keep extremes, values that are not finite count nowhere else, lines
follow their runs.
"""

import math

import numpy as np
import pytest

from lightning_ring.tools.report.charts import bar_chart, intervals, line_chart


def test_a_long_line_is_drawn_by_means_and_keeps_its_extremes():
    points = np.array([(float(step), 2.0 * step) for step in range(20_000)])
    points[7_001, 1], points[9_003, 1], points[:100, 1] = 1e6, math.inf, math.nan
    found = intervals(points)
    assert found.shape == (200, 4)
    assert found[:, 3].max() == 1e6
    assert found[0, 1] == pytest.approx(2.0 * found[0, 0])
    assert np.isfinite(found).all()
    assert len(intervals(points[100:300])) == 200
    assert intervals(points[:100]).shape == (0, 4)


@pytest.mark.parametrize("low", [0.0, -3.0, 1e-30, 1e9])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, 1e30])
@pytest.mark.parametrize("title", ["loss", "accuracy"])
def test_extreme_values_are_drawn(low, size, title):
    chart = line_chart(title, {0: [(0, low), (1, low + size)]})
    assert 'class="run-0"' in chart
    assert "nan" not in chart.lower()


def test_minor_labels_of_a_log_scale_leave_a_whole_figure():
    chart = line_chart("loss", {0: [(0, 0.02), (1, 0.6)]})
    assert "log scale" in chart
    assert chart.count("<tspan") == chart.count("</tspan>") > 0


def test_steps_and_ranks_have_whole_ticks():
    chart = line_chart("ring/world_size", {0: [(0, 3.0), (1, 2.0)]})
    assert ">2.5<" not in chart
    assert ">0.5<" not in chart
    assert ">3<" in chart


def test_bars_have_the_colours_of_their_parts():
    chart = bar_chart({"run <a>": {"forward": 1.0, "data": 2.0}}, ["forward", "data"])
    assert "var(--c0)" in chart
    assert "var(--c1)" in chart
    assert "run &lt;a&gt;" in chart
