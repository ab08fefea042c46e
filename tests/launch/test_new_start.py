"""When a job begins again from a checkpoint, and where: the steward and its processes only record."""

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
        self.ended = "the state is lost."

    def begin_anew(self) -> None:
        self.resume_from = None


class Process:
    """One of a job, in ``slot``."""

    def __init__(self, slot: int, died: float | None = None) -> None:
        self.slot, self.died, self.killed = slot, died, False
        self.child = SimpleNamespace(kill_session=self.kill)

    def kill(self) -> None:
        self.killed = True


def test_processes_begin_again_in_the_slots_of_those_that_lived() -> None:
    starts: Any = NewStarts()
    steward: Any = Steward()
    ended, hanging, dead = Process(0), Process(1), Process(2, died=1.0)
    starts.note_end(ended, 1)
    assert starts.look(steward, [hanging, dead], 10.0) is None
    starts.note_end(dead, -9)
    assert starts.look(steward, [hanging], 20.0) is None
    assert not hanging.killed
    assert starts.look(steward, [hanging], 26.0) is None
    assert hanging.killed
    starts.note_end(hanging, -9)
    assert starts.look(steward, [], 27.0) == [0, 1]
    assert starts.checkpoint == "last.ckpt"
    assert steward.resume_from is None


def test_a_job_that_gets_no_further_ends(capsys: pytest.CaptureFixture[str]) -> None:
    starts: Any = NewStarts()

    def lose(found: tuple[str, int]) -> Any:
        starts.note_end(Process(0), 1)
        return starts.look(Steward(found), [], 0.0)

    assert [lose(found) for found in (CHECKPOINT, CHECKPOINT, ("last.ckpt", 2))] == [[0]] * 3  # the file has changed
    assert [lose(("last.ckpt", 2)) for _ in range(3)] == [[0], [0], []]
    assert "began 3 times from last.ckpt" in capsys.readouterr().err


def test_a_job_of_which_nobody_lives_ends() -> None:
    starts: Any = NewStarts()
    assert starts.look(Steward(), [], 0.0) == []
