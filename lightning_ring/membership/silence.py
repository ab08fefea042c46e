"""Members that keep the others waiting without a sign of life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ring.membership.membership import Membership

_LOOK_SECONDS = 0.2
# seconds between two looks; what is longer was the steward's own absence (it was stopped)
_LONGEST_GAP = 0.5


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a process that says nothing is removed.

    ``answer``: seconds without an answer to the steward, in which the process also used no
    processor time: it is stopped, or hangs. ``start``: the same for a process that has not come as
    far as to be ready, while others are: it may read data, or load libraries from a slow disk.
    ``report``: seconds for which a member keeps others waiting that are ready for the next view,
    whether it computes or not.
    """

    answer: float = 10.0
    start: float = 300.0
    report: float = 600.0


class Silence:
    """Finds those that are silent for too long. `look` is called again and again, with the
    monotonic clock's time.

    ``idle(member)``: the seconds in which a process used no processor time, as far as it is known.
    """

    def __init__(self, limits: SilenceLimits, idle: Callable[[int], float]) -> None:
        self._limits = limits
        self._idle = idle
        self._heard: dict[int, float] = {}
        self._since: dict[int, float] = {}  # when others began to wait for a process
        self._next_look = 0.0
        self._now = 0.0  # time in which the steward looked
        self._last_look: float | None = None

    def heard(self, member: int) -> None:
        """``member``, which is connected, has sent something."""
        self._heard[member] = self._now

    def forget(self, member: int) -> None:
        self._heard.pop(member, None)

    def look(self, now: float, membership: Membership) -> dict[int, str]:
        """Those that are to be removed, with the reasons."""
        self._now += (
            min(now - self._last_look, _LONGEST_GAP) if self._last_look is not None else 0.0
        )
        self._last_look = now
        if self._now < self._next_look:
            return {}
        self._next_look = self._now + _LOOK_SECONDS
        found: dict[int, str] = {}
        for member, heard in self._heard.items():
            quiet = self._quiet(member, heard)
            if quiet > self._limits.answer:
                found[member] = (
                    f"it has neither answered nor used processor time for {quiet:.0f} s (stopped, "
                    "or hung)"
                )
        starting, awaited = _starting(membership), _awaited(membership)
        self._since = {
            member: self._since.get(member, self._now) for member in [*starting, *awaited]
        }
        for member in starting:
            quiet = self._quiet(member, self._since[member])
            if quiet > self._limits.start:
                found.setdefault(
                    member,
                    f"it was started, and has used no processor time for {quiet:.0f} s (it hangs)",
                )
        for member in awaited:
            waited = self._now - self._since[member]
            if waited > self._limits.report:
                found.setdefault(member, f"the other ranks have waited for it for {waited:.0f} s")
        return found

    def _quiet(self, member: int, since: float) -> float:
        waited = self._now - since
        return (
            min(waited, self._idle(member))
            if waited > min(self._limits.answer, self._limits.start)
            else 0.0
        )


def _starting(membership: Membership) -> list[int]:
    """Processes that are not ready, while others are."""
    starting = list(membership.expected)
    return starting if membership.view is not None or membership.newcomers else []


def _awaited(membership: Membership) -> list[int]:
    """Members of a view that is over, once another one is ready for the next."""
    missing = membership.unreported
    return missing if len(missing) < len(membership.members) else []
