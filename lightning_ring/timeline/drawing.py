"""Gantt charts of steps: what each rank computed, and of each bucket when it waited, travelled
and was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

READY, ON_THE_WIRE, WAITED_FOR = "ready", "on the wire", "waited for"
_COLOURS = {  # by the first words of a kind
    "data": "#8c8c8c",
    "copy": "#b0a08c",
    "forward": "#59a14f",
    "backward": "#4e79a7",
    "optimizer": "#b07aa1",
    READY: "#d9d9d9",
    ON_THE_WIRE: "#f28e2b",
    "gradients": "#f28e2b",
    "parameters": "#edc948",
    WAITED_FOR: "#e15759",
    "waiting": "#e15759",
    "": "#b3b3b3",
}
_CHARACTER = 0.0055  # width of one, as a part of the picture's


@dataclass(frozen=True, slots=True)
class Bar:
    """Something of ``kind`` that lasted from ``start`` to ``stop``, in seconds. Bars of a lane
    share a row.

    ``text`` is written inside the bar if it fits. ``group``, such as a rank, is written beside its
    lanes.
    """

    lane: str
    kind: str
    start: float
    stop: float
    text: str = ""
    group: str = ""


def draw(bars: Sequence[Bar], labels: Iterable[str] = (), title: str = "") -> Any:
    """A matplotlib figure of ``bars``, a row for each lane in the order of their first bars.

    ``labels`` replace the lanes' names.
    """
    from matplotlib.figure import Figure  # no pyplot: it would look for a display
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys((bar.group, bar.lane) for bar in bars))
    names = [
        name if len(name) < 60 else f"{name[:57]}..."
        for name in labels or [lane for _, lane in lanes]
    ]
    figure = Figure(figsize=(12, 1.6 + 0.26 * len(lanes)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    span = max((bar.stop for bar in bars), default=1.0)
    for bar in bars:
        row, height = lanes.index((bar.group, bar.lane)), 0.34 if bar.kind == WAITED_FOR else 0.8
        axes.barh(
            row,
            1e3 * (bar.stop - bar.start),
            left=1e3 * bar.start,
            height=height,
            color=_colour(bar.kind),
        )
        if bar.stop - bar.start > len(bar.text) * _CHARACTER * span:
            middle = 500 * (bar.start + bar.stop)
            axes.text(middle, row, bar.text, ha="center", va="center", fontsize=6, clip_on=True)
    for group in dict.fromkeys(group for group, _ in lanes if group):
        rows = [row for row, (its, _) in enumerate(lanes) if its == group]
        axes.axhline(rows[-1] + 0.5, color="black", linewidth=0.8)
        beside = axes.get_yaxis_transform()
        axes.text(1.005, sum(rows) / len(rows), group, transform=beside, va="center", rotation=270)
    axes.set_yticks(range(len(lanes)), names, fontsize=8)
    axes.set(
        ylim=(len(lanes) - 0.5, -0.5), xlim=(0, 1e3 * span), xlabel="milliseconds", title=title
    )
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    kinds = {
        kind
        for bar in bars
        for kind in _COLOURS
        if kind in (READY, ON_THE_WIRE, WAITED_FOR) and bar.kind == kind
    }
    patches = [Patch(color=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in kinds]
    if patches:
        figure.legend(handles=patches, loc="outside lower right", ncols=3, fontsize=8)
    return figure


def _colour(kind: str) -> str:
    return next(colour for word, colour in _COLOURS.items() if kind.startswith(word))
