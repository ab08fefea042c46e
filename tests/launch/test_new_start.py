"""When a job begins again from a checkpoint, and where: the steward and its processes only
record.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ring.launch.new_start import NewStarts

CHECKPOINT = ("last.ckpt", 1)


class Steward:
    """One that has heard that the state is lost."""

    def __init__(self, found: tuple[str, int] = CHECKPOINT) -> None:
        self.resume_from: tuple[str, int] | None = found
        self.ended: str | None = "the state is lost."

    def begin_anew(self) -> None:
        self.resume_from = self.ended = None


def process(slot: int, died: float | None = None) -> Any:
    """One of a job."""
    return SimpleNamespace(slot=slot, died=died, kill_at=None)


def test_processes_begin_again_in_the_slots_of_those_that_lived(
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts: Any = NewStarts()
    steward: Any = Steward()
    ended, hanging, dead = process(0), process(1), process(2, died=1.0)
    assert starts.note_end(ended, 1)
    assert starts.look(steward, [hanging, dead], 0, 10.0) is None
    assert not starts.note_end(dead, -9)
    assert starts.look(steward, [hanging], 0, 20.0) is None
    assert hanging.kill_at is None
    assert starts.look(steward, [hanging], 0, 26.0) is None
    assert (hanging.kill_at, dead.kill_at) == (26.0, None)
    assert starts.note_end(hanging, -9)
    assert starts.look(steward, [], 1, 27.0) == [0, 1]
    assert starts.checkpoint == "last.ckpt"
    assert steward.ended is None
    assert "the state is lost. 3 processes begin again from last.ckpt" in capsys.readouterr().err


def test_a_job_that_gets_no_further_ends(capsys: pytest.CaptureFixture[str]) -> None:
    starts: Any = NewStarts()

    def lose(found: tuple[str, int]) -> Any:
        steward: Any = Steward(found)
        starts.note_end(process(0), 1)
        slots = starts.look(steward, [], 0, 0.0)
        assert (steward.ended is None) is bool(slots)
        return slots

    # the file has changed
    assert [lose(found) for found in (CHECKPOINT, CHECKPOINT, ("last.ckpt", 2))] == [[0]] * 3
    assert [lose(("last.ckpt", 2)) for _ in range(3)] == [[0], [0], []]
    assert "began 3 times from last.ckpt" in capsys.readouterr().err


@pytest.mark.parametrize("pending", [0, 2])
def test_a_job_of_which_nobody_lives_ends_unless_others_come(pending: int) -> None:
    starts: Any = NewStarts()
    steward: Any = Steward()
    assert starts.look(steward, [], pending, 0.0) == []
    assert (steward.ended is None) is (pending > 0)
