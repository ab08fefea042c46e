"""Collectives on a device: its events tell the times, not the host, which only queues them."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.timeline.recorder import Recorder, Tracks
from lightning_ring.timeline.trace_files import TraceFile
from tests.timeline.killed_writers import OTHER


def record_of(*, called: float, ended: float, waits: float) -> CollectiveRecord:
    """Times of the device, in seconds, stand for events. The host did it all in 10 µs, a second
    before.
    """
    record = CollectiveRecord("bucket 0 (w)", "all_reduce", 400, 1.0, 1.000001, 1.000005, 1.00001)
    record.events = called, ended  # type: ignore[assignment]
    record.wait_event = waits  # type: ignore[assignment]
    return record


def slices(tmp_path: Path, *records: CollectiveRecord) -> list[tuple[str, float, float]]:
    """Name, begin and duration in milliseconds."""
    path = tmp_path / "t.rank0.jsonl"
    recorder = Recorder(
        TraceFile(path, OTHER, max_bytes=1 << 22), Tracks(0), 0.0, lambda mark: mark
    )
    for record in records:
        recorder.collective(record)
    recorder.close(OTHER)
    events = [
        json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if '"ph":"X"' in line
    ]
    return [(event["name"], event["ts"] / 1e3, event["dur"] / 1e3) for event in events]


def test_a_stream_waits_from_its_own_event_to_the_end_of_the_collective(tmp_path: Path) -> None:
    wire, wait = slices(tmp_path, record_of(called=2.0, ended=2.5, waits=2.25))
    assert wire == ("all-reduce", 2000, 500)
    assert wait == ("wait for gradients of bucket 0", 2250, 250)


def test_a_stream_that_comes_late_waits_for_nothing(tmp_path: Path) -> None:
    _, wait = slices(tmp_path, record_of(called=2.0, ended=2.5, waits=2.75))
    assert wait == ("wait for gradients of bucket 0", 2750, 0)
