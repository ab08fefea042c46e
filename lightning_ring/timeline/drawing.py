"""Gantt charts of steps: what each rank computed, and of each bucket when it waited, travelled
and was waited for. Needs matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

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


# -- of a merged trace


def plot(trace: Path, path: Path, steps: tuple[int, int] | None = None) -> None:
    """Draw ``steps`` (first and last; default: the last two that every rank finished) of ``trace``
    into ``path``.

    Raises `ConfigurationError`: the trace has no such steps.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    begin, end = _span(events, *(steps or _last_steps(events)))
    threads, bars = _names(events), []
    sizes: dict[tuple[str, str], int] = {}  # in bytes, of the largest message of a lane
    for event in sorted(events, key=lambda event: (event["pid"], event["tid"])):
        if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            group, lane = threads[event["pid"], event["tid"]]
            queued = event["name"] == "queued"
            start, stop = (
                max(begin, event["ts"]) - begin,
                min(end, event["ts"] + event["dur"]) - begin,
            )
            kind, text = (READY, "") if queued else (lane, event["name"])
            bars.append(Bar(lane, kind, start / 1e6, stop / 1e6, text, group))
            size = (
                event["args"].get("bytes", 0) if lane.startswith(("gradients", "parameters")) else 0
            )
            sizes[group, lane] = max(size, sizes.get((group, lane), 0))
    draw(bars, [_label(lane, size) for (_, lane), size in sizes.items()]).savefig(path, dpi=110)


def _last_steps(events: list[dict[str, Any]]) -> tuple[int, int]:
    numbers = [
        {event["args"]["step"] for event in events if event["pid"] == pid and _is_step(event)}
        for pid in {event["pid"] for event in events}
    ]
    common = set.intersection(*numbers) if numbers else set()
    if not common:
        raise ConfigurationError("--plot: the trace holds no step that all of its ranks finished.")
    return max(min(common), max(common) - 1), max(common)


def _span(events: list[dict[str, Any]], first: int, last: int) -> tuple[float, float]:
    steps = [
        event for event in events if _is_step(event) and first <= event["args"]["step"] <= last
    ]
    if not steps:
        raise ConfigurationError(f"--steps {first}-{last}: the trace holds none of these steps.")
    return min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)


def _names(events: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[str, str]]:
    """The names of process and thread, by the numbers of both."""
    named = [event for event in events if event["name"] in ("process_name", "thread_name")]
    processes = {
        event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"
    }
    threads = [event for event in named if event["name"] == "thread_name"]
    return {
        (event["pid"], event["tid"]): (processes[event["pid"]], event["args"]["name"])
        for event in threads
    }


def _label(lane: str, size: int) -> str:
    if not size:
        return lane
    return f"{lane}, {size / 1e6:.1f} MB" if size >= 1e5 else f"{lane}, {size / 1e3:.1f} kB"


def _is_step(event: dict[str, Any]) -> bool:
    return bool(event["ph"] == "X" and event["name"].startswith("step "))
