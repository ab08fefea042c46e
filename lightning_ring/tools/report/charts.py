"""Charts as inline SVG: matplotlib draws them, the page's style sheet colours them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure  # not pyplot, which would look for a display
from matplotlib.ticker import MaxNLocator

NUM_COLOURS, DASHES = 6, ("-", (0, (5, 2)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)))
NUM_LINES = NUM_COLOURS * len(DASHES)  # that can be told apart
# of a longer line, which is drawn as their means, with a band from least to greatest value
_NUM_INTERVALS = 200
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "axes.formatter.limits": (-3, 5),
}
_TEXT = "#0000fe"  # stands for the page's colour of text; #0100N0 for its colour number N

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, lines: Mapping[int, Points], x_label: str, *, log: bool = False
) -> Markup:
    """A figure with one line for each run, by number. ``log`` takes effect where values are
    positive and the greatest is 20 times the least. Values that are not finite are crosses at the
    upper edge."""
    arrays = {
        number: np.array(points, dtype=float).reshape(-1, 2) for number, points in lines.items()
    }
    values = np.concatenate([array[:, 1] for array in arrays.values()])
    finite = values[np.isfinite(values)]
    log = log and finite.size > 0 and finite.min() > 0 and finite.max() > 20 * finite.min()
    figure, axes = _axes(4.8, 2.5)
    for number, array in arrays.items():
        look: dict[str, Any] = {"gid": f"run-{number}", "color": _colour(number % NUM_COLOURS)}
        x, middle, low, high = intervals(array)
        marker = "o" if len(array) <= _NUM_INTERVALS // 4 else None
        dashes = DASHES[number // NUM_COLOURS % len(DASHES)]
        axes.plot(x, middle, marker=marker, markersize=2.5, lw=1.4, linestyle=dashes, **look)
        if len(x) < len(array):
            axes.fill_between(x, low, high, alpha=0.2, lw=0, **look)
        lost = array[~np.isfinite(array[:, 1]), 0][:_NUM_INTERVALS]
        axes.plot(
            lost, np.full(len(lost), 0.97), "x", ms=5, transform=axes.get_xaxis_transform(), **look
        )
    axes.set(xlabel=x_label, yscale="log" if log else "linear")
    if log:
        axes.yaxis.set_major_formatter("{x:g}")
    steps = np.concatenate([array[:, 0] for array in arrays.values()])
    for axis, numbers in ((axes.xaxis, steps), (axes.yaxis, finite)):
        whole = numbers.size and (numbers == np.round(numbers)).all()
        if whole and not (log and axis is axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    num_lost = values.size - finite.size
    notes = ["log scale"] if log else []
    if max(map(len, arrays.values())) > _NUM_INTERVALS:
        notes.append("line: mean, band: least to greatest value")
    if num_lost:
        notes.append(f"×: {num_lost:,} values that are NaN or infinite")
    return _figure(figure, title, "; ".join(notes))


def bar_chart(
    rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, int]
) -> Markup:
    """A bar a row, of parts in milliseconds, in the order of ``colours``: the number of each
    part's colour.
    """
    figure, axes = _axes(9.6, 1.0 + 0.28 * len(rows))
    left = np.zeros(len(rows))
    for part, colour in colours.items():
        widths = np.array([parts.get(part, 0.0) for _, parts in rows])
        axes.barh(range(len(rows)), widths, left=left, color=_colour(colour), label=part)
        left += widths
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    figure.legend(loc="outside upper left", ncols=len(colours), frameon=False, labelcolor=_TEXT)
    return _figure(figure, "", "")


def key(number: int) -> Markup:
    """A short piece of run ``number``'s line."""
    dashes = DASHES[number // NUM_COLOURS]
    array = "none" if dashes == "-" else " ".join(map(str, dashes[1]))
    line = '<path d="M0 5H26" style="stroke: var(--c{}); stroke-width: 2; stroke-dasharray: {}"/>'
    svg = Markup('<svg class="key" viewBox="0 0 26 10">' + line + "</svg>")
    return svg.format(number % NUM_COLOURS, array)


def short(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    if not math.isfinite(value) or size == 0 or 1e-3 <= size < 1e5:
        return f"{value:,.4g}" if size < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def intervals(array: np.ndarray) -> tuple[np.ndarray, ...]:
    """Middle, mean, least and greatest finite value of equally many (points, 2) each; a short
    line is left as it is.
    """
    finite = np.ma.masked_invalid(array[:, 1])
    if len(array) <= _NUM_INTERVALS:
        return array[:, 0], *(finite.filled(math.nan),) * 3
    parts = np.array_split(finite, _NUM_INTERVALS)
    middle = np.array([part.mean() for part in np.array_split(array[:, 0], _NUM_INTERVALS)])
    kinds = ([getattr(part, kind)() for part in parts] for kind in ("mean", "min", "max"))
    filled = ([np.ma.filled(value, math.nan) for value in values] for values in kinds)
    return middle, *map(np.array, filled)


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_TEXT)
    axes.tick_params(colors=_TEXT, width=0.6)
    axes.xaxis.label.set_color(_TEXT)
    axes.grid(True, axis="y", alpha=0.25, lw=0.6)
    return figure, axes


def _colour(number: int) -> str:
    return f"#0100{number:x}0"


def _figure(figure: Figure, title: str, notes: str) -> Markup:
    file = StringIO()
    with rc_context(_STYLE):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue().partition("<svg")
    text = "<svg" + svg[2]
    whole = r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    text = re.sub(whole, "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", text, count=5)
    text = re.sub(r'id="(run-\d+)"', r'class="\1"', text.replace("xlink:href", "href"))
    # the same in every chart
    text = re.sub(r' id="[A-Za-z0-9.]+_[\w.]*"| font-family: [^;"]+;?', "", text)
    text = re.sub(r"#0100(\d)0\b", r"var(--c\1)", text.replace(_TEXT, "var(--soft)"))
    text = " ".join(text.split())
    head = Markup('<figure class="chart"><figcaption>{} <small>{}</small></figcaption>').format(
        title, notes
    )
    return head + Markup(text) + Markup("</figure>")
