"""A picture of some steps of a merged trace. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.drawing import READY, Bar, draw


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
