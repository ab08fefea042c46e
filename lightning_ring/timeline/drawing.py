"""Gantt charts of steps: what each rank computed, and of each bucket when it waited, travelled
and was waited for. Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

# by the first words of a lane, or by what a bar says
_COLOURS = {
    "data": "#8c8c8c",
    "copy": "#b0a08c",
    "forward": "#59a14f",
    "backward": "#4e79a7",
    "optimizer": "#b07aa1",
    "queued": "#d9d9d9",
    "gradients": "#f28e2b",
    "parameters": "#edc948",
    "wait": "#e15759",
    "": "#b3b3b3",
}
# width of one, as a part of the picture's
_CHARACTER = 0.0055


# its lane (a rank, and a name), what is written inside if it fits, begin and end in milliseconds
Bar = tuple[tuple[str, str], str, float, float]


def plot(trace: Path, path: Path, steps: tuple[int, int] | None) -> None:
    """Draw ``steps`` (first and last; `None`: the last two that every rank finished) of the merged
    ``trace`` into ``path``, a row for each lane in the order of their first bars.

    Raises `ConfigurationError`: the trace has no such steps, or is damaged.
    """
    # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    bars = read_trace(trace, steps)
    lanes = list(dict.fromkeys(bar[0] for bar in bars))
    figure = Figure(figsize=(12, 1.6 + 0.26 * len(lanes)), dpi=100, layout="constrained")
    axes = figure.add_subplot(ylim=(len(lanes) - 0.5, -0.5), xlabel="milliseconds")
    span = max(stop for *_, stop in bars)
    for lane, text, start, stop in bars:
        row, width = lanes.index(lane), stop - start
        colours = _COLOURS.items()
        colour = next(one for word, one in colours if text == word or lane[1].startswith(word))
        axes.barh(row, width, left=start, color=colour)
        if width > len(text) * _CHARACTER * span:
            middle = (start + stop) / 2
            axes.text(middle, row, text, ha="center", va="center", fontsize=6, clip_on=True)
    for rank in dict.fromkeys(rank for rank, _ in lanes):
        rows = [row for row, lane in enumerate(lanes) if lane[0] == rank]
        axes.axhline(rows[-1] + 0.5, color="black", linewidth=0.8)
        beside = axes.get_yaxis_transform()
        axes.text(1.005, sum(rows) / len(rows), rank, transform=beside, va="center", rotation=270)
    axes.set_yticks(range(len(lanes)), [lane[:60] for _, lane in lanes], fontsize=8)
    axes.set_xlim(0, span)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)


def read_trace(trace: Path, steps: tuple[int, int] | None) -> list[Bar]:
    try:
        events = json.loads(trace.read_text())["traceEvents"]
        begin, end = _span(events, steps)
        names, bars = {}, []
        for event in events:
            if event["name"] in ("process_name", "thread_name"):
                names[event["pid"], event["tid"]] = event["args"]["name"]
        for event in sorted(events, key=lambda event: (event["pid"], event["tid"])):
            start, stop = event["ts"], event["ts"] + event.get("dur", 0)
            if event["ph"] == "X" and start < end and stop > begin:
                # a process's own name has thread 0
                lane = names[event["pid"], 0], names[event["pid"], event["tid"]]
                start, stop = ((min(end, max(begin, at)) - begin) / 1e3 for at in (start, stop))
                bars.append((lane, event["name"], start, stop))
        return bars
    except ConfigurationError:
        raise
    # of damaged events: anything
    except Exception as error:
        raise ConfigurationError(
            f"{trace} is a damaged timeline ({error!r:.200}). Merge it again from the ranks' files."
        ) from error


def _span(events: list[dict[str, Any]], steps: tuple[int, int] | None) -> tuple[float, float]:
    whole = [one for one in events if one["ph"] == "X" and one["name"].startswith("step ")]
    if steps is None:
        numbers: dict[int, set[int]] = {event["pid"]: set() for event in events}
        for event in whole:
            numbers[event["pid"]].add(event["args"]["step"])
        common = sorted(set.intersection(*numbers.values()))
        if not common:
            raise ConfigurationError(
                "--plot: the trace holds no step that all of its ranks finished."
            )
        steps = max(common[0], common[-1] - 1), common[-1]
    first, last = steps
    mine = [event for event in whole if first <= event["args"]["step"] <= last]
    if not mine:
        raise ConfigurationError(f"--steps {first}-{last}: the trace holds none of these steps.")
    return min(event["ts"] for event in mine), max(event["ts"] + event["dur"] for event in mine)
