"""Line charts as inline SVG, whose colours follow the page's theme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from markupsafe import Markup

NUM_COLOURS, NUM_DASHES = 6, 4
NUM_LINES = NUM_COLOURS * NUM_DASHES  # that can be told apart
_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 36
_MOST_POINTS = 400  # of a line: more are thinned
_MOST_DOTS = 200  # of a chart
_SMOOTHED = 60  # from this many points on a line has a running mean
_MOST_NOISY_LINES = 6  # of more, only running means are drawn


@dataclass(frozen=True, slots=True)
class Line:
    """``number`` is its run's, which decides on colour and dashes."""

    number: int
    name: str
    points: Sequence[tuple[float, float]]


def look(number: int) -> str:
    """CSS classes of a run."""
    return f"run-{number} colour-{number % NUM_COLOURS} dash-{number // NUM_COLOURS % NUM_DASHES}"


def line_chart(title: str, lines: Sequence[Line], x_label: str, *, log: bool = False, smooth: bool = False) -> Markup:
    """A figure. ``log`` takes effect where all values are above 0 and the greatest is 20 times the least; ``smooth``
    adds a running mean where lines are long. Values that are not finite are crosses at the upper edge."""
    smooth = smooth and any(len(line.points) >= _SMOOTHED for line in lines)
    means = [replace(line, points=running_mean(line.points)) for line in lines] if smooth else []
    raw = lines if not means or len(lines) <= _MOST_NOISY_LINES else []
    points = [point for line in raw or means for point in line.points]
    finite = [y for _, y in points if math.isfinite(y)]
    log = log and min(finite, default=0.0) > 0 and max(finite) > 20 * min(finite)
    axes = _Axes(_span([x for x, _ in points], False), _span(finite, log), log)
    dots = not means and len(points) <= _MOST_DOTS
    parts = [*_grid(axes), *_draw(raw, axes, smooth, dots), *_draw(means, axes, False, False)]
    notes = {
        "log scale": log,
        "thick: running mean" if raw else "running mean": smooth,
        "thinned: least and greatest value of each interval": any(len(line.points) > _MOST_POINTS for line in lines),
        f"×: {len(points) - len(finite):,} values that are NaN or infinite": len(points) > len(finite),
    }
    return Markup(
        '<figure class="chart"><figcaption>{title} <small>{notes}</small></figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title} over {x_label}">{parts}'
        '<text x="{x}" y="{y}" text-anchor="middle">{x_label}</text></svg></figure>'
    ).format(
        title=title,
        notes="; ".join(note for note, holds in notes.items() if holds),
        width=_WIDTH,
        height=_HEIGHT,
        x_label=x_label,
        parts=Markup("").join(parts),
        x=(_LEFT + _WIDTH - _RIGHT) / 2,
        y=_HEIGHT - 4,
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    x_span: tuple[float, float]
    y_span: tuple[float, float]
    log: bool

    def x(self, value: float) -> float:
        low, high = self.x_span
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = (math.log10(end) for end in self.y_span) if self.log else self.y_span
        share = ((math.log10(value) if self.log else value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _span(values: Sequence[float], log: bool) -> tuple[float, float]:
    """From the least to the greatest, and a margin where that is too little to be drawn."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        return low / 1.1, high * 1.1
    size = max(abs(low), abs(high))
    if high - low <= 1e-6 * size:
        margin = 0.05 * size or 1.0
        return low - margin, high + margin
    return low, high


def _grid(axes: _Axes) -> Iterator[Markup]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in _decades(*axes.y_span) if axes.log else _ticks(*axes.y_span):
        y = axes.y(value)
        yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(_LEFT, y, right)
        yield Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(_LEFT - 6, y + 4, f"{value:,.6g}")
    for value in _ticks(*axes.x_span):
        x = axes.x(value)
        yield Markup('<path class="grid" d="M{:.1f} {}V{}"/>').format(x, bottom, bottom + 4)
        yield Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(x, bottom + 17, f"{value:,.6g}")


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    unit = 10 ** math.floor(math.log10((high - low) / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (unit * factor) <= most)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    values = [factor * 10.0**exponent for exponent in exponents[:: 1 + len(exponents) // 8] for factor in factors]
    return [value for value in values if low <= value <= high]


def short(value: float) -> str:
    size = abs(value)
    if not math.isfinite(value) or size == 0 or 1e-3 <= size < 1e5:
        return f"{value:,.4g}" if size < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def _draw(lines: Sequence[Line], axes: _Axes, faint: bool, dots: bool) -> Iterator[Markup]:
    for line in lines:
        classes = f"{look(line.number)}{' faint' if faint else ''}"
        points = thinned(line.points)
        yield Markup('<path class="line {}" d="{}"/>').format(classes, _path(points, axes))
        for x, y in points:
            if not math.isfinite(y):
                yield Markup('<text class="lost {}" x="{:.1f}" y="{}">×</text>').format(classes, axes.x(x), _TOP + 6)
            elif dots or len(points) == 1:
                yield Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}</title></circle>').format(
                    classes, axes.x(x), axes.y(y), f"{line.name}: {short(y)} at {short(x)}"
                )


def _path(points: Sequence[tuple[float, float]], axes: _Axes) -> str:
    """Interrupted where a value is not finite."""
    words, command = [], "M"
    for x, y in points:
        if math.isfinite(y):
            words.append(f"{command}{axes.x(x):.1f} {axes.y(y):.1f}")
        command = "L" if math.isfinite(y) else "M"
    return "".join(words)


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Of each of equally many points: the least, the greatest and the first that is not finite, in their order."""
    if len(points) <= _MOST_POINTS:
        return points
    kept: list[tuple[float, float]] = []
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [point for point in group if math.isfinite(point[1])]
        chosen = {*[point for point in group if not math.isfinite(point[1])][:1]}
        if finite:
            chosen |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(chosen)
    return kept


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Over a twentieth of the line around each point; values that are not finite stay, and count nowhere else."""
    reach = len(points) // 40
    finite = [math.isfinite(y) for _, y in points]
    sums = [0.0, *accumulate(y if here else 0.0 for (_, y), here in zip(points, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    means = []
    for index, (x, y) in enumerate(points):
        low, high = max(0, index - reach), min(len(points), index + reach + 1)
        means.append((x, (sums[high] - sums[low]) / (counts[high] - counts[low]) if finite[index] else y))
    return means
