"""A picture of some steps of a merged trace. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

_COLORS = (  # first word of a track's name that fits
    ("data", "#8da0cb"),
    ("forward", "#66c2a5"),
    ("backward", "#fc8d62"),
    ("waiting", "#d62728"),
    ("optimizer", "#a6d854"),
    ("gradients", "#e5c494"),
    ("parameters", "#e78ac3"),
    ("", "#b3b3b3"),
)
_MOST_LANES = 14  # a rank
_CHARACTER = 0.0055  # width of one, as a part of the picture's


def plot(trace: Path, path: Path, steps: tuple[int, int] | None = None) -> None:
    """Draw ``steps`` (first and last; default: the last two that every rank finished) of ``trace`` into ``path``.

    Raises `ConfigurationError`: the trace has no such steps.
    """
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    events = json.loads(trace.read_text())["traceEvents"]
    first, last = steps or _last_steps(events)
    begin, end = _span(events, first, last)
    rows = _rows(events, begin, end)
    figure = Figure(figsize=(12, 0.8 + 0.26 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for row, (_, _, slices) in enumerate(rows):
        for event in slices:
            _draw(axes, row, event, begin, rows[row][1], (end - begin) / 1e3)
    for row in range(1, len(rows)):
        if rows[row][0] != rows[row - 1][0]:
            axes.axhline(row - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_label(track, slices) for _, track, slices in rows], fontsize=8)
    for process in dict.fromkeys(process for process, _, _ in rows):
        mine = [row for row, (its, _, _) in enumerate(rows) if its == process]
        axes.text(
            1.005, sum(mine) / len(mine), process, transform=axes.get_yaxis_transform(), va="center", rotation=270
        )
    axes.set(xlim=(0, (end - begin) / 1e3), ylim=(len(rows) - 0.5, -0.5), xlabel="milliseconds")
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


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
    steps = [event for event in events if _is_step(event) and first <= event["args"]["step"] <= last]
    if not steps:
        raise ConfigurationError(f"--steps {first}-{last}: the trace holds none of these steps.")
    return min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)


def _rows(events: list[dict[str, Any]], begin: float, end: float) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """For each thread that did something in the span: its process, its name, its slices."""
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        thread = event["pid"], event["tid"]
        if event["name"] == "thread_name":
            names[thread] = event["args"]["name"]
        elif event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            slices.setdefault(thread, []).append(event)
    rows: list[tuple[str, str, list[dict[str, Any]]]] = []
    for pid in sorted(processes):
        threads = sorted(thread for thread in slices if thread[0] == pid)
        rows += [(processes[pid], names[thread], slices[thread]) for thread in threads[:_MOST_LANES]]
    return rows


def _draw(axes: Any, row: int, event: dict[str, Any], begin: float, track: str, span: float) -> None:
    color = next(color for word, color in _COLORS if track.startswith(word))
    start, length = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
    queued = event["name"] == "queued"
    axes.broken_barh(
        [(start, length)],
        (row - 0.4, 0.8),
        facecolors="white" if queued else color,
        edgecolors=color if queued else "black",
        hatch="////" if queued else None,
        linewidth=0.3,
    )
    text = event["name"]
    if not queued and length > len(text) * _CHARACTER * span:
        axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=6, clip_on=True)


def _label(track: str, slices: list[dict[str, Any]]) -> str:
    sizes = [event["args"]["bytes"] for event in slices if "bytes" in event["args"]]
    if not sizes or not track.startswith(("gradients", "parameters")):
        return track
    size = max(sizes)
    return f"{track}, {size / 1e6:.1f} MB" if size >= 1e5 else f"{track}, {size / 1e3:.1f} kB"


def _is_step(event: dict[str, Any]) -> bool:
    return bool(event["ph"] == "X" and event["name"].startswith("step "))
