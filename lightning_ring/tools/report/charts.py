"""Charts as inline SVG: matplotlib draws them, the page's style sheet colours them."""

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure  # not pyplot, which would look for a display
from matplotlib.ticker import MaxNLocator

NUM_COLOURS, DASHES = 6, ("", "5 2", "1.5 2", "6 2 1.5 2")
NUM_LINES = NUM_COLOURS * len(DASHES)  # that can be told apart
_NUM_INTERVALS = 200  # of a longer line, which is drawn by the means of each
_TEXT = "#0000fe"  # stands for the page's colour of text; #0100N0 for its colour number N
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "axes.formatter.limits": (-3, 5),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.25,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT),
}


@rc_context(_STYLE)
def line_chart(title: str, lines: Mapping[int, Sequence[tuple[float, float]]]) -> Markup:
    """A figure with one line for each run, by number. The scale of a loss is logarithmic where
    values are positive and the greatest is 20 times the least."""
    arrays = {number: np.array(points, dtype=float) for number, points in lines.items()}
    values = np.concatenate([*arrays.values()])[:, 1]
    finite = values[np.isfinite(values)]
    log = "loss" in title.lower() and finite.size and finite.max() > 20 * finite.min() > 0
    figure = Figure(figsize=(4.8, 2.5), layout="constrained")
    axes: Any = figure.add_subplot()
    for number, array in arrays.items():
        look: dict[str, Any] = {"gid": f"run-{number}", "color": _colour(number % NUM_COLOURS)}
        x, middle, low, high = intervals(array).T
        marker = "o" if len(array) <= _NUM_INTERVALS // 4 else None
        dashes = list(map(float, DASHES[number // NUM_COLOURS].split())) or (None, None)
        axes.plot(x, middle, marker=marker, markersize=2.5, lw=1.4, dashes=dashes, **look)
        axes.fill_between(x, low, high, alpha=0.2, lw=0, **look)
    axes.set(xlabel="step")
    notes = ["log scale"] if log else []
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    elif (finite == np.round(finite)).all():
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if max(map(len, arrays.values())) > _NUM_INTERVALS:
        notes.append("line: mean, band: least to greatest value")
    if num_lost := values.size - finite.size:
        notes.append(f"{num_lost:,} values are NaN or infinite")
    return _figure(figure, title, "; ".join(notes))


@rc_context(_STYLE)
def bar_chart(rows: Mapping[str, Mapping[str, float]], parts: Sequence[str]) -> Markup:
    """A bar a row, of ``parts`` in milliseconds, each in a colour of its own."""
    figure = Figure(figsize=(9.6, 1.0 + 0.28 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    left = np.zeros(len(rows))
    for number, part in enumerate(parts):
        widths = np.array([row.get(part, 0.0) for row in rows.values()])
        colour = _colour(min(number, NUM_COLOURS))
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=part)
        left += widths
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    figure.legend(loc="outside upper left", ncols=len(parts), frameon=False, labelcolor=_TEXT)
    return _figure(figure, "", "")


def intervals(points: np.ndarray) -> np.ndarray:
    """Rows of equally many finite ``points`` (of a step and a value): mean step, mean, least and
    greatest value. A short line is left as it is."""
    finite = points[np.isfinite(points[:, 1])]
    parts = np.array_split(finite, min(len(finite), _NUM_INTERVALS)) if len(finite) else []
    rows = [(*part.mean(axis=0), part[:, 1].min(), part[:, 1].max()) for part in parts]
    return np.array(rows).reshape(-1, 4)


def _colour(number: int) -> str:
    return f"#0100{number:x}0"


def _figure(figure: Figure, title: str, notes: str) -> Markup:
    figure.savefig(file := StringIO(), format="svg", transparent=True)
    text = file.getvalue().partition("<svg")[2]
    text = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", text, count=5)
    text = re.sub(r'id="(run-\d+)"', r'class="\1"', text)
    # The same in every chart.
    text = re.sub(r' id="[A-Za-z0-9.]+_[\w.]*"| font-family: [^;"]+;?', "", text)
    text = re.sub(r"#0100(\d)0\b", r"var(--c\1)", text.replace(_TEXT, "var(--soft)"))
    head = Markup('<figure class="chart"><figcaption>{} <small>{}</small></figcaption>')
    return head.format(title, notes) + Markup(f"<svg {' '.join(text.split())}</figure>")
