"""Line charts: thinning keeps extremes, ticks are round, a running mean skips what is not finite."""

from __future__ import annotations

import math
import re

import pytest

from lightning_ring.tools.report.charts import Line, line_chart, running_mean, thinned


def test_thinning_keeps_extremes_and_the_order() -> None:
    points = [(float(step), math.sin(step / 50)) for step in range(20_000)]
    points[7_001] = (7_001.0, 9.0)
    points[9_003] = (9_003.0, math.nan)
    kept = thinned(points)
    assert len(kept) <= 401
    assert (7_001.0, 9.0) in kept
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert thinned(points[:400]) == points[:400]


def test_a_running_mean_of_a_straight_line_is_that_line() -> None:
    points = [(float(step), 2.0 * step) for step in range(200)]
    points[100] = (100.0, math.inf)
    means = running_mean(points)
    assert means[50] == (50.0, 100.0)
    assert means[100] == (100.0, math.inf)
    assert means[101] == (101.0, pytest.approx(202.2)), "without its neighbour"


@pytest.mark.parametrize(("num_lines", "num_paths", "note"), [(2, 4, "thick: running mean"), (7, 7, "running mean")])
def test_many_noisy_lines_are_drawn_by_their_means_alone(num_lines: int, num_paths: int, note: str) -> None:
    lines = [Line(number, "a", [(step, step % 7) for step in range(100)]) for number in range(num_lines)]
    chart = line_chart("accuracy", lines, "step", smooth=True)
    assert chart.count('class="line') == num_paths
    assert f"<small>{note}</small>" in chart


@pytest.mark.parametrize("low", [0.0, -3.0, 1e-30, 1e9])
@pytest.mark.parametrize("size", [0.0, 1e-9, 0.7, 1.0, 1e30])
@pytest.mark.parametrize("log", [False, True])
def test_ticks_and_lines_lie_inside_the_chart(low: float, size: float, log: bool) -> None:
    chart = line_chart("loss", [Line(0, "a", [(0, low), (1, low + size)])], "step", log=log)
    heights = [float(text) for text in re.findall(r'cy="([^"]+)"', chart)]
    assert len(heights) == 2
    assert all(10 <= height <= 214 for height in heights)
    labels = re.findall(r'text-anchor="end">([^<]+)<', chart)
    assert 1 <= len(labels) <= 12
    assert len(set(labels)) == len(labels)
