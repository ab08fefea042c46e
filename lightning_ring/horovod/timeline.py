"""`start_timeline`: what the ranks negotiate and run, as a Chrome trace that rank 0 writes."""

from __future__ import annotations

import datetime
import time
import uuid
from pathlib import Path

from lightning_ring.timeline.clocks import ClockReading
from lightning_ring.timeline.session import Session
from lightning_ring.timeline.settings import GENERATOR


class Timeline:
    """Of one process set, from now until `write`. Each name is a row: the wait for all ranks, then
    the run.
    """

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        self._mark_cycles = mark_cycles
        began, zero = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        run = {"generator": GENERATOR, "run": uuid.uuid4().hex[:12], "began": began.isoformat()}
        clock = ClockReading(0.0, 0.0, zero, shared=True)
        self._session = Session(path, run | {"world_size": 1}, 0, zero, clock, None)
        epoch = {"start_time_since_epoch_in_micros": int(began.timestamp() * 1e6)}
        self._session.recorder.slice("cycles", "START", zero, zero, epoch)
        self.write = self._session.finish

    def cycle(self) -> None:
        if self._mark_cycles:
            now = time.monotonic()
            self._session.recorder.slice("cycles", "CYCLE_START", now, now)

    def ran(self, name: str, kind: str, submitted: float, began: float) -> None:
        """``name`` has run now; times are seconds of `time.monotonic`."""
        what, slice_ = kind.upper(), self._session.recorder.slice
        slice_(name, f"NEGOTIATE_{what}", submitted, began)
        slice_(name, what, began, time.monotonic())
