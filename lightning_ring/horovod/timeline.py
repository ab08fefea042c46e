"""`start_timeline`: what the ranks negotiate and run, as a Chrome trace that rank 0 writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Timeline:
    """Events of one process set, in memory until `write`. Each name is a row: the wait for all
    ranks, then the run.
    """

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        self.path = path
        self._mark_cycles = mark_cycles
        self._began = time.time()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    def cycle(self) -> None:
        if self._mark_cycles:
            self._add(
                {"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": self._now()}
            )

    def negotiated(self, name: str, kind: str, since: float) -> None:
        """All ranks have submitted ``name``, the first one at ``since`` (seconds of
        `time.monotonic`).
        """
        waited = time.monotonic() - since
        self._slice(name, f"NEGOTIATE_{kind.upper()}", self._now() - waited * 1e6, waited)

    def ran(self, names: Iterable[str], kind: str, seconds: float) -> None:
        for name in names:
            self._slice(name, kind.upper(), self._now() - seconds * 1e6, seconds)

    def write(self) -> None:
        """Write the trace. The file is complete, or not there."""
        head = [
            {
                "name": "process_name",
                "ph": "M",
                "pid": 0,
                "args": {
                    "name": "horovod",
                    "start_time_since_epoch_in_micros": int(self._began * 1e6),
                },
            },
            *(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
                for name, row in self._rows.items()
            ),
        ]
        with self._lock:
            text = json.dumps([*head, *self._events])
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(text)
        part.replace(self.path)

    def _slice(self, name: str, what: str, begin: float, seconds: float) -> None:
        row = self._rows.setdefault(name, len(self._rows) + 1)
        self._add(
            {
                "name": what,
                "ph": "X",
                "pid": 0,
                "tid": row,
                "ts": max(0.0, begin),
                "dur": seconds * 1e6,
            }
        )

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)

    def _now(self) -> float:
        return (time.time() - self._began) * 1e6
