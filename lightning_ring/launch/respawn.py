"""When a process replaces one that died: at once the first time, later each time, and not for
ever.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RespawnLimits:
    """``limit``: deaths of one slot in a row, each within ``steady`` seconds after the start, that
    are made good.

    The first replacement comes after ``delay`` seconds, each further one after twice the time of
    the one before, at most a minute. A process that lived for ``steady`` seconds starts the count
    anew. A slot is a rank's place on a host: what is broken there kills one process after the
    other, and does not count for other slots.
    """

    limit: int = 5
    delay: float = 0.5
    steady: float = 60.0


class Respawns:
    """The replacements that are due, by slot. Times are the monotonic clock's."""

    def __init__(self, limits: RespawnLimits) -> None:
        self._limits = limits
        self.in_a_row: dict[int, int] = {}  # deaths, by slot
        self._due: dict[int, float] = {}

    def died(self, slot: int, now: float, lived: float) -> bool:
        """A process died ``lived`` seconds after its start. Returns whether another one will
        replace it.
        """
        in_a_row = 1 if lived >= self._limits.steady else self.in_a_row.get(slot, 0) + 1
        self.in_a_row[slot] = in_a_row
        if in_a_row > self._limits.limit:
            return False
        self._due[slot] = now + min(60.0, self._limits.delay * 2 ** (in_a_row - 1))
        return True

    def take_due(self, now: float) -> list[int]:
        """The slots whose next process is to start now."""
        due = [slot for slot, time in self._due.items() if time <= now]
        for slot in due:
            del self._due[slot]
        return due

    @property
    def pending(self) -> int:
        """The number of processes that are to start later."""
        return len(self._due)
