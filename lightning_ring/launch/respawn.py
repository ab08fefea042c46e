"""When a process takes the place of one that died: at once the first time, later each time, and not for ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RespawnLimits:
    """``limit``: deaths in a row, each within ``steady`` seconds after the start, after which no other process comes.

    The first one comes after ``delay`` seconds, each further one after twice the time of the one before, at most a
    minute. A process that lived for ``steady`` seconds starts the count anew.
    """

    limit: int = 5
    delay: float = 0.5
    steady: float = 60.0


class Respawns:
    """The starts that are due on one host. Times are the monotonic clock's."""

    def __init__(self, limits: RespawnLimits) -> None:
        self._limits = limits
        self._in_a_row = 0
        self._due: list[float] = []

    def died(self, now: float, lived: float) -> bool:
        """A process died ``lived`` seconds after its start. Returns whether another one will take its place."""
        self._in_a_row = 1 if lived >= self._limits.steady else self._in_a_row + 1
        if self._in_a_row > self._limits.limit:
            return False
        self._due.append(now + min(60.0, self._limits.delay * 2 ** (self._in_a_row - 1)))
        return True

    def take_due(self, now: float) -> int:
        """The number of processes to start now."""
        due = [time for time in self._due if time <= now]
        self._due = [time for time in self._due if time > now]
        return len(due)

    @property
    def pending(self) -> int:
        """The number of processes that are to start later."""
        return len(self._due)
