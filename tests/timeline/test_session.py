"""What stands in the way of a timeline is one error, the same on every rank."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.recorder import STEPS
from lightning_ring.timeline.session import start_session
from lightning_ring.timeline.trace_files import TraceFile
from tests.checks.trace_format import read_trace, slices
from tests.thread_ranks import run_ranks

SIZE = 1 << 22


def refused(path: Path, world_size: int = 2) -> str:
    """The error that all ranks raise."""

    def rank(comm: Communicator) -> str:
        with pytest.raises(ConfigurationError) as caught:
            start_session(path, comm, max_bytes=SIZE, about={})
        return str(caught.value)

    said = run_ranks(world_size, rank)
    assert len(set(said)) == 1
    return said[0]


def test_a_disk_that_rank_0_filled_is_the_error_of_rank_1_on_both(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Rank 0's file is there, and the disk has no room for another."""
    opened, opens = os.open, []

    def no_room(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).endswith(".jsonl"):
            opens.append(Path(path).name)
            if opens.count("trace.rank0.jsonl") != 1 or "rank1" in opens[-1]:
                raise OSError(28, "No space left on device")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", no_room)
    said = refused(tmp_path / "trace.json")
    assert (
        f"cannot be written (rank 1: {tmp_path}/trace.rank1.jsonl: No space left on device)" in said
    )
    assert sorted(opens) == ["trace.rank0.jsonl", "trace.rank1.jsonl"]
    assert not list(tmp_path.iterdir())


def test_a_path_that_another_job_writes_is_refused_on_every_rank(
    tmp_path: Path, monkeypatch: Any
) -> None:
    first = start_session(tmp_path / "t.json", None, max_bytes=SIZE, about={})
    # another process has none
    monkeypatch.setattr("lightning_ring.timeline.session._times_started", {})
    first.recorder.slice(STEPS, "step 0", 0.0, 1.0)
    said = refused(tmp_path / "t.json")
    assert "t.json is in use: t.rank0.jsonl, another job" in said
    first.finish()
    assert [event["name"] for event in slices(read_trace(tmp_path / "t.json"), "steps", 0)] == [
        "step 0"
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.json", "t.rank0.jsonl"]

    second = start_session(tmp_path / "t.json", None, max_bytes=SIZE, about={})
    second.finish()
    assert "step 0" not in (tmp_path / "t.json").read_text(), (
        "the first one has ended, and is replaced"
    )


def test_a_rank_whose_own_file_is_taken_is_named(tmp_path: Path) -> None:
    """As where another job's other rank runs on its host."""
    file = TraceFile(tmp_path / "t.rank1.jsonl", {"generator": "another"}, max_bytes=SIZE)
    before = file.path.read_bytes()
    assert f"(rank 1: {file.path}: another job is writing it now)" in refused(tmp_path / "t.json")
    assert file.path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [file.path.name]
    file.close({"generator": "another"})


def test_of_two_that_start_together_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.rank0.jsonl"
    with open(path, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"of the first")
        other.flush()
        with pytest.raises(OSError, match="another job is writing it now"):
            TraceFile(path, {}, max_bytes=SIZE)
        assert path.read_bytes() == b"of the first"


def test_a_home_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    start_session(Path("~/home.json"), None, max_bytes=SIZE, about={}).finish()
    assert (tmp_path / "home.json").exists()


def test_a_folder_that_nobody_can_make_names_the_variable() -> None:
    said = refused(Path("/proc/nope/trace.json"))
    assert "/proc/nope" in said
    assert "Give timeline= or RING_TIMELINE a path" in said
