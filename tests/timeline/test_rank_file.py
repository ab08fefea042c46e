"""A rank's file holds whole events at every moment: between writes and after ``kill -9`` at any
time.
"""

import json
import os
import random
import sys

import pytest

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.timeline.recorder import Recorder
from lightning_ring.timeline.trace_files import TraceFile, read_other
from tests.processes import run
from tests.timeline.killed_writers import OTHER, numbers, some_events


def test_events_can_be_read_at_once_and_the_closed_file_says_how_it_ended(tmp_path):
    path = tmp_path / "trace.rank0.jsonl"
    path.write_text("of an earlier run")
    file = TraceFile(path, OTHER, max_bytes=1 << 22)
    assert (numbers(path), read_other(path)) == ([], OTHER)
    random_, written = random.Random(0), 0
    for _ in range(20):
        events = some_events(written, random_)
        file.append(events)
        written += len(events)
        assert numbers(path) == list(range(written))
    file.close(OTHER | {"ended": "now"})
    file.close(OTHER)
    assert numbers(path) == list(range(written))
    assert read_other(path) == OTHER | {"ended": "now"}
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_a_torn_last_line_is_no_event_and_no_end(tmp_path):
    path = tmp_path / "trace.rank0.jsonl"
    file = TraceFile(path, OTHER, max_bytes=1 << 22)
    file.append(['{"i":0}', '{"i":1}'])
    file.close(OTHER | {"ended": "now"})
    content = path.read_bytes()
    for length in range(content.index(b"\n") + 1, len(content)):
        path.write_bytes(content[:length])
        assert numbers(path) == list(range(content[:length].count(b"\n") - 1))
        assert read_other(path) == OTHER


@pytest.mark.ranks
def test_whole_after_kill_9_at_any_time(tmp_path):
    result = run(
        [sys.executable, "-m", "tests.timeline.killed_writers", str(tmp_path / "t.jsonl"), "60"]
    )
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) == 60
    assert len(set(lines)) > 20, "killed at many different places"


def test_a_full_file_drops_what_comes_later_and_stays_valid(tmp_path):
    path = tmp_path / "trace.rank0.jsonl"
    file = TraceFile(path, OTHER, max_bytes=40_000)
    for first in range(0, 9000, 30):
        file.append(f'{{"i":{number}}}' for number in range(first, first + 30))
    assert file.full
    found = numbers(path)
    assert found == list(range(len(found)))
    assert 2000 < len(found) < 9000
    file.append(['{"i":-1}'])
    file.close(OTHER | {"ended": "now"})
    assert numbers(path) == found
    assert path.stat().st_size <= 40_000


def test_a_disk_that_fails_is_an_error_and_leaves_whole_events(tmp_path, monkeypatch):
    path = tmp_path / "trace.rank0.jsonl"
    file = TraceFile(path, OTHER, max_bytes=1 << 22)
    file.append(['{"i":0}', '{"i":1}'])
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with pytest.raises(OSError, match="3 of 8 bytes were written"):
        file.append(['{"i":2}'])
    assert numbers(path) == [0, 1]
    monkeypatch.setattr(
        os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        TraceFile(tmp_path / "other.jsonl", OTHER, max_bytes=1 << 22)
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents":[\n', "\x00\x01", '{"otherData":3}\n'])
def test_what_is_no_timeline_is_said(tmp_path, text):
    path = tmp_path / "t.rank0.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"t\.rank0\.jsonl is no timeline of a rank"):
        read_other(path)


def record_of(*, called, ended, waits):
    """Times of the device, in seconds, stand for events. The host did it all in 10 µs, a second
    before.
    """
    record = CollectiveRecord("bucket 0 (w)", "all_reduce", 400, 1.0, 1.000001, 1.000005, 1.00001)
    record.events = called, ended
    record.wait_event = waits
    return record


def slices(tmp_path, *records):
    """Name, begin and duration in milliseconds."""
    path = tmp_path / "t.rank0.jsonl"
    file = TraceFile(path, OTHER, max_bytes=1 << 22)
    recorder = Recorder(file, 0, "rank 0", "", 0.0, lambda mark: mark)
    for record in records:
        recorder.collective(record)
    recorder.close(OTHER)
    events = [
        json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if '"ph":"X"' in line
    ]
    return [(event["name"], event["ts"] / 1e3, event["dur"] / 1e3) for event in events]


def test_a_stream_waits_from_its_own_event_to_the_end_of_the_collective(tmp_path):
    wire, wait = slices(tmp_path, record_of(called=2.0, ended=2.5, waits=2.25))
    assert wire == ("all-reduce", 2000, 500)
    assert wait == ("wait for gradients of bucket 0", 2250, 250)


def test_a_stream_that_comes_late_waits_for_nothing(tmp_path):
    _, wait = slices(tmp_path, record_of(called=2.0, ended=2.5, waits=2.75))
    assert wait == ("wait for gradients of bucket 0", 2750, 0)
