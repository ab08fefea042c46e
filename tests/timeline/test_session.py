"""What stands in the way of a timeline is one error, the same on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.thread_backend import run_ranks
from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.session import start_session

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


def test_a_disk_that_rank_0_filled_is_the_error_of_rank_1_on_both(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 0's file is there, and the disk has no room for another, not even for a copy of that one."""
    opened, parts = os.open, []

    def no_room(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).endswith(".part"):
            parts.append(Path(path).name)
            if parts.count("trace.rank0.json.part") != 1 or "rank1" in parts[-1]:
                raise OSError(28, "No space left on device")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", no_room)
    said = refused(tmp_path / "trace.json")
    assert f"cannot be written (rank 1: {tmp_path}/trace.rank1.json: No space left on device)" in said
    assert sorted(parts) == ["trace.rank0.json.part", "trace.rank1.json.part"]
    assert not list(tmp_path.iterdir())
