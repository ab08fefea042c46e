"""A rank's file is valid JSON at every moment: read between writes, and after ``kill -9`` at any time."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.timeline.lanes import STEPS, Lanes
from lightning_ring.timeline.rank_file import PAGE, TraceFile, read_events, read_other
from lightning_ring.timeline.recorder import Recorder
from tests.processes import run
from tests.timeline.killed_writers import OTHER, numbers, some_events


def test_every_write_leaves_a_valid_file_with_all_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.rank0.json"
    file = TraceFile(path, OTHER, '{"i":0}', max_bytes=1 << 22, first_size=2 * PAGE)
    random_, written = random.Random(0), 1
    for _ in range(60):
        events = some_events(written, random_)
        file.append(events)
        written += len(events)
        assert numbers(path) == list(range(written))
    assert path.stat().st_size % (2 * PAGE) == 0, "it has grown by doubling"
    file.close(OTHER | {"ended": "now"})
    file.close(OTHER)
    assert numbers(path) == list(range(written)) == [json.loads(event)["i"] for event in read_events(path)]
    assert read_other(path)["ended"] == "now"
    assert b" " * 100 not in path.read_bytes()[-200:]
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_no_write_touches_two_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel looks for SIGKILL between two pages: a write within one is done or not."""
    pages: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def noting(file: int, data: Any, offset: int) -> int:
        pages.append((offset // PAGE, (offset + len(data) - 1) // PAGE))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    file = TraceFile(tmp_path / "t.rank0.json", OTHER, '{"i":0}', max_bytes=1 << 22)
    random_, written = random.Random(1), 1
    for _ in range(40):
        events = some_events(written, random_)
        file.append(events)
        written += len(events)
    file.close(OTHER)
    assert len(pages) > 40
    assert all(first == last for first, last in pages)
    assert numbers(tmp_path / "t.rank0.json") == list(range(written))


@pytest.mark.ranks
def test_valid_after_kill_9_at_any_time(tmp_path: Path) -> None:
    result = run([sys.executable, "-m", "tests.timeline.killed_writers", str(tmp_path / "t.json"), "300"], timeout=60)
    assert result.returncode == 0, result.stdout
    lengths = result.stdout.split()
    assert len(lengths) == 300
    assert len(set(lengths)) > 50, "killed at many different places"


def test_a_full_file_drops_what_comes_later_and_stays_valid(tmp_path: Path) -> None:
    path = tmp_path / "trace.rank0.json"
    file = TraceFile(path, OTHER, '{"i":0}', max_bytes=10 * PAGE, first_size=2 * PAGE)
    file.append(f'{{"i":{number}}}' for number in range(1, 9000))
    assert file.full
    found = numbers(path)
    assert found == list(range(file.num_events))
    assert 100 < len(found) < 9000
    assert path.stat().st_size <= 10 * PAGE
    file.append(['{"i":-1}'])
    file.close(OTHER)
    assert numbers(path) == found


def test_a_disk_that_fails_is_an_error_and_leaves_a_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.rank0.json"
    file = TraceFile(path, OTHER, '{"i":0}', max_bytes=1 << 22, first_size=2 * PAGE)
    file.append(['{"i":1}'])
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        file.append(['{"i":2}'])
    assert numbers(path) == [0, 1]


def test_after_a_disk_that_fails_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go on for a week."""
    lanes = Lanes(0)
    recorder = Recorder(TraceFile(tmp_path / "t.rank0.json", OTHER, '{"i":0}', max_bytes=1 << 22), lanes, 0.0)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    recorder.slice(STEPS, "step 0", 0.0, 1.0)
    recorder._thread.join(timeout=10)
    for _ in range(3):
        recorder.slice(STEPS, "step 1", 1.0, 2.0)
        recorder.collective(CollectiveRecord("bucket 0 (a)", "all_reduce", 4, 1.0, 1.1, 1.2, 1.3, 1.25))
    assert not recorder._queue
    recorder.close({})


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents":[\n', "\x00\x01", '{"otherData":3,"traceEvents":[\n]}'])
def test_what_is_no_timeline_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.rank0.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"t\.rank0\.json is no timeline of a rank"):
        read_other(path)
