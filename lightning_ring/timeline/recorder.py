"""Slices and collectives of a rank, as trace events that a thread writes to its trace file."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.timeline.trace_files import TraceFile, compact

log = logging.getLogger(__name__)

STEPS, DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER = range(1, 7)
# GRADIENTS + i is bucket i's
GRADIENTS, PARAMETERS, OTHER, PAUSES, RANKS = 1_000, 10_000, 20_000, 30_000, 40_000
# tracks that have a name of their own
NAMED = 50_000
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
# seconds, which `kill -9` may take of the end
FLUSH_SECONDS = 0.2


def track_of(name: str) -> int:
    """The track of a collective, by the name that its caller gave it."""
    match = _BUCKET.match(name)
    if match is None:
        return OTHER
    return (PARAMETERS if match[1] else GRADIENTS) + min(int(match[2]), PARAMETERS - GRADIENTS - 1)


def track_name(track: int) -> str:
    if track in _NAMES:
        return _NAMES[track]
    if track < PARAMETERS:
        return f"gradients of bucket {track - GRADIENTS}"
    return f"parameters of bucket {track - PARAMETERS}"


class Recorder:
    """Takes slices and collectives of one rank (a process ``pid`` of the trace) from the training
    thread, and writes them from a thread of its own.

    Taking one costs an append to a queue. When the file cannot be written any more (a full disk) or
    has its largest size, one warning is logged and training goes on. A track is a thread of the
    trace: a number from above, or a name that gets one. A slice that began before the last one of
    its track had ended begins later.

    Args:
        process: The name of the rank in the trace, and ``label`` what stands beside it.
        zero: The trace's zero, in seconds of `time.perf_counter`.
        seconds_of: Turns a CUDA event into such seconds, or into `None` while the device has not
            reached it; `None` where there are no events.
    """

    def __init__(
        self,
        file: TraceFile,
        pid: int,
        process: str,
        label: str,
        zero: float,
        seconds_of: Callable[[Any], float | None] | None = None,
    ) -> None:
        self.step = 0
        self._file = file
        self._pid = pid
        self._zero = zero
        self._seconds_of: Any = seconds_of
        self._queue = deque[Callable[[], Iterable[str] | None]]()
        self._step_began = self._ended_before = -math.inf
        self._ends: dict[int, int] = {}  # of the last slice of each track, nanoseconds
        self._named: dict[str, int] = {}
        self._failed = False
        self._closing = threading.Event()
        named = {"name": process}, {"labels": label}, {"sort_index": pid}
        events = (
            self._event("M", 0, f"process_{what}", one, ts=0) for one in named for what in one
        )
        file.append(events)
        self._thread = threading.Thread(
            target=self._write_now_and_then, name="lightning_ring timeline", daemon=True
        )
        self._thread.start()

    def begin_step(self, step: int, began: float) -> None:
        """From ``began`` (seconds) on, collectives that are called belong to ``step``."""
        self.step, self._step_began = step, began

    def slice(
        self, track: int | str, name: str, begin: Any, end: Any, args: dict[str, Any] | None = None
    ) -> None:
        """A slice of ``track``; ``begin`` and ``end`` are seconds, or CUDA events."""

        def events() -> Iterable[str] | None:
            times = self._seconds(begin, end)
            return self._slice(track, name, times[0], times[1], args) if times else None

        if not self._failed:
            self._queue.append(events)

    def collective(self, record: CollectiveRecord) -> None:
        """A listener of `RecordedCommunicator`."""
        step = self.step if record.called >= self._step_began else self.step - 1
        if not self._failed:
            self._queue.append(lambda: self._collective(record, step))

    def close(self, other: dict[str, Any]) -> None:
        """Write what is left, and ``other`` as the trace's ``otherData``. Calling it twice is
        fine.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if not self._failed:
            self._write(other)

    def _write_now_and_then(self) -> None:
        while not self._failed and not self._closing.wait(FLUSH_SECONDS):
            self._write()

    def _write(self, other: dict[str, Any] | None = None) -> None:
        """What the device has come to; with ``other`` everything, and the file's end."""
        was_full = self._file.full
        events: list[str] = []
        try:
            while self._queue:
                made = self._queue[0]()
                # the device has not come so far
                if made is None and other is None:
                    break
                self._queue.popleft()
                events.extend(made or ())
            self._file.append(events)
            if other is not None:
                self._file.close(other | {"dropped": self._file.full})
        except OSError as error:
            self._give_up(error)
        if self._file.full and not was_full:
            log.warning(
                "lightning_ring: the timeline %s has reached its largest size and ends here; "
                "training goes on.",
                self._file.path,
            )

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        # nobody takes anything from it any more
        self._queue.clear()
        self._file.leave()
        log.warning(
            "lightning_ring: the timeline %s ends here, it cannot be written any more (%s). "
            "Training goes on.",
            self._file.path,
            error,
        )

    def _collective(self, record: CollectiveRecord, step: int) -> Iterable[str] | None:
        if record.events is None:
            waits, until = record.waited_from, record.waited_until
            times = [record.called, record.ended or until, waits, until]
        else:
            # the host has only queued the wait: it is the stream that waits, from when it comes to
            # it
            called, over = record.events
            times = self._seconds(called, over, record.wait_event, over)
        if not times:
            return None
        called, ended, waits, until = times
        ended, until = max(called, ended), max(waits, until)
        # of two that overlap, the earlier one has the wire
        began = min(max(called, self._ended_before), ended)
        self._ended_before = max(self._ended_before, ended)
        what = {"step": step, "bytes": record.nbytes}
        args = what | {
            "name": record.name[:500],
            "called": round((record.called - self._zero) * 1e6, 3),
            "call_us": round((record.returned - record.called) * 1e6, 1),
            "queued_us": round((began - called) * 1e6, 1),
            "waited_for": round((waits - self._zero) * 1e6, 3),
            "waited_us": round((until - waits) * 1e6, 1),
        }
        track, kind = track_of(record.name), record.kind.replace("_", "-")
        events = self._slice(track, kind, called, ended, args, queued=began)
        named = track_name(track) if track != OTHER else record.name or kind
        return chain(events, self._slice(EXPOSED, f"wait for {named}", waits, until, what))

    def _seconds(self, *marks: Any) -> list[float]:
        """Empty while the device has not come so far."""
        found = [mark if isinstance(mark, float) else self._seconds_of(mark) for mark in marks]
        return [] if None in found else found

    def _slice(
        self,
        track: int | str,
        name: str,
        begin: float,
        end: float,
        args: dict[str, Any] | None,
        queued: float = -math.inf,
    ) -> Iterator[str]:
        """Events of one slice; before the first of a thread comes its name. A slice within it shows
        what was ``queued`` until then.
        """
        if isinstance(track, str):
            title, track = track, self._named.setdefault(track, NAMED + len(self._named))
        else:
            title = track_name(track)
        if track not in self._ends:
            yield self._event("M", track, "thread_name", {"name": title}, ts=0)
            yield self._event("M", track, "thread_sort_index", {"sort_index": track}, ts=0)
        start, stop = (round((at - self._zero) * 1e9) for at in (begin, end))
        start = max(0, start, self._ends.get(track, 0))
        stop = self._ends[track] = max(start, stop)
        # microseconds
        times = {"ts": start / 1e3, "dur": (stop - start) / 1e3}
        yield self._event("X", track, name[:200], args or {}, **times)
        until = round((max(queued, begin) - self._zero) * 1e9)
        if start < until <= stop:
            yield self._event("X", track, "queued", {}, **times | {"dur": (until - start) / 1e3})

    def _event(self, ph: str, tid: int, name: str, args: dict[str, Any], **times: float) -> str:
        event = {"ph": ph, "pid": self._pid, "tid": tid, "name": name}
        return compact(event | times | {"args": args})
