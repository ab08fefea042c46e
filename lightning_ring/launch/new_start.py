"""A job whose ranks have lost their state begins again from a checkpoint, in new processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_ring.job.exit import say
from lightning_ring.launch.job_process import JobProcess, by_signal
from lightning_ring.launch.supervisor import PEERS_SECONDS
from lightning_ring.membership.steward import Steward

_LIMIT = 3  # starts in a row from the same checkpoint: the job does not get beyond it


@dataclass(slots=True)
class NewStarts:
    """Waits for the end of all processes when the state is lost, and tells where others are to
    start.

    Attributes:
        checkpoint: From which the current processes began; an empty string for the first ones.
    """

    checkpoint: str = ""
    _since: float | None = field(default=None, init=False)  # when the state was found to be lost
    _slots: set[int] = field(default_factory=set, init=False)  # of processes that lived then
    _tried: tuple[str, int] | None = field(default=None, init=False)
    _in_a_row: int = field(default=0, init=False)

    def note_end(self, process: JobProcess, code: int) -> bool:
        """A process has ended, after the loss. Returns whether its slot gets another one at the new
        start.

        Else a signal has ended it: a death as any other.
        """
        if not by_signal(code):
            self._slots.add(process.slot)
        return process.slot in self._slots

    def look(
        self, steward: Steward, running: Sequence[JobProcess], pending: int, now: float
    ) -> list[int] | None:
        """The slots in which processes are to start now, `None` as long as some run.

        The steward serves them then; if it does not, the job fails. ``pending`` processes start
        later, as replacements.
        """
        assert steward.resume_from is not None
        if self._since is None:
            if not self._allows(steward.resume_from):
                checkpoint, _ = steward.resume_from
                say(
                    f"the job began {_LIMIT} times from {checkpoint}, and lost its state before "
                    "the next checkpoint"
                )
                return []
            self._since = now
        if now - self._since > PEERS_SECONDS:
            for process in running:
                if process.died is None and process.kill_at is None:
                    self._slots.add(process.slot)
                    process.kill_at = now
        if running:
            return None
        slots, self._slots, self._since = sorted(self._slots), set(), None
        if slots or pending:
            self.checkpoint, _ = steward.resume_from
            say(
                f"{steward.ended} {len(slots) + pending} processes begin again from "
                f"{self.checkpoint}"
            )
            steward.begin_anew()
        return slots

    def _allows(self, found: tuple[str, int]) -> bool:
        """``found``: a path, and the version of the file."""
        self._in_a_row = self._in_a_row + 1 if found == self._tried else 1
        self._tried = found
        return self._in_a_row <= _LIMIT
