"""The tracks of a rank, and slices as trace events. Times are integers of nanoseconds since the
trace's zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

STEPS, DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER = range(1, 7)
# GRADIENTS + i is bucket i's
GRADIENTS, PARAMETERS, OTHER, PAUSES, RANKS = 1_000, 10_000, 20_000, 30_000, 40_000
_NAMES = {
    STEPS: "steps",
    DATA: "data wait",
    FORWARD: "forward",
    BACKWARD: "backward",
    EXPOSED: "waiting for communication",
    OPTIMIZER: "optimizer step",
    OTHER: "other collectives",
    PAUSES: "validation and checkpoints",
    RANKS: "ranks",
}
_BUCKET = re.compile(r"(parameters of )?bucket (\d+)")
_ABREAST = 8  # tracks of one name, for what runs at the same time
_LONGEST_NAME = 200


def track_of(name: str) -> int:
    """The track of a collective, by the name that its caller gave it."""
    match = _BUCKET.match(name)
    if match is None:
        return OTHER
    return (PARAMETERS if match[1] else GRADIENTS) + min(int(match[2]), PARAMETERS - GRADIENTS - 1)


def track_name(track: int) -> str:
    if PARAMETERS <= track < OTHER:
        return f"parameters of bucket {track - PARAMETERS}"
    if GRADIENTS <= track < PARAMETERS:
        return f"gradients of bucket {track - GRADIENTS}"
    return _NAMES[track]


class Tracks:
    """Trace events of one rank (a process ``pid`` of the trace). Slices of one thread follow each
    other or nest.

    A track whose slice begins before the last one ended gets a second thread of its name, up to 8;
    past that the slice begins later.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ends: dict[int, int] = {}

    def slice(
        self,
        track: int,
        name: str,
        begin: int,
        end: int,
        args: dict[str, Any] | None = None,
        inside: tuple[str, int] | None = None,
    ) -> Iterator[str]:
        """Events of one slice in ``track``; before the first of a thread comes its name.

        ``inside`` are name and end of a slice that begins with this one and lies within it.
        """
        begin, end = max(0, begin), max(0, begin, end)
        tid = track * _ABREAST
        while self._ends.get(tid, 0) > begin and tid % _ABREAST < _ABREAST - 1:
            tid += 1
        if tid not in self._ends:
            yield from self._describe(tid, track)
        begin = max(begin, self._ends.get(tid, 0))
        end = max(begin, end)
        self._ends[tid] = end
        yield self._complete(tid, name, begin, end, args or {})
        if inside is not None and begin < inside[1] <= end:
            yield self._complete(tid, inside[0], begin, inside[1], {})

    def process(self, name: str, labels: str) -> Iterator[str]:
        for what, args in (
            ("process_name", {"name": name}),
            ("process_labels", {"labels": labels}),
            ("process_sort_index", {"sort_index": self._pid}),
        ):
            yield self._metadata(0, what, args)

    def _describe(self, tid: int, track: int) -> Iterator[str]:
        abreast = tid % _ABREAST
        name = track_name(track) + (f" ({abreast + 1})" if abreast else "")
        yield self._metadata(tid, "thread_name", {"name": name})
        yield self._metadata(tid, "thread_sort_index", {"sort_index": tid})

    def _complete(self, tid: int, name: str, begin: int, end: int, args: dict[str, Any]) -> str:
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}  # microseconds
        return compact(
            {
                "ph": "X",
                "pid": self._pid,
                "tid": tid,
                "name": name[:_LONGEST_NAME],
                **times,
                "args": args,
            }
        )

    def _metadata(self, tid: int, name: str, args: dict[str, Any]) -> str:
        return compact(
            {"ph": "M", "pid": self._pid, "tid": tid, "name": name, "ts": 0, "args": args}
        )


def compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
