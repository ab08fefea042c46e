"""Members that keep the others waiting without a sign of life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ring.membership.membership import Membership

_LONGEST_GAP = 0.5  # seconds between two looks; what is longer was the steward's own absence (it was stopped)


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a process that says nothing is removed.

    ``answer``: seconds without an answer to the steward, in which the process also used no processor time: it is
    stopped, or hangs. ``report``: seconds for which it keeps others waiting that are ready for the next view; it may
    compute meanwhile, or not have come as far as to connect.
    """

    answer: float = 10.0
    report: float = 300.0


class Silence:
    """Finds those that are silent for too long. `look` is called again and again, with the monotonic clock's time.

    ``idle(member)``: the seconds in which a process used no processor time, as far as it is known.
    """

    def __init__(self, limits: SilenceLimits, idle: Callable[[int], float]) -> None:
        self._limits = limits
        self._idle = idle
        self._heard: dict[int, float] = {}
        self._waited_for: dict[int, float] = {}
        self._now = 0.0  # time in which the steward looked
        self._last_look: float | None = None

    def heard(self, member: int) -> None:
        """``member``, which is connected, has sent something."""
        self._heard[member] = self._now

    def forget(self, member: int) -> None:
        self._heard.pop(member, None)

    def look(self, now: float, membership: Membership) -> dict[int, str]:
        """Those that are to be removed, with the reasons."""
        self._now += min(now - self._last_look, _LONGEST_GAP) if self._last_look is not None else 0.0
        self._last_look = now
        found: dict[int, str] = {}
        for member, heard in self._heard.items():
            quiet = min(self._now - heard, self._idle(member))
            if quiet > self._limits.answer:
                found[member] = f"it has neither answered nor used processor time for {quiet:.0f} s (stopped, or hung)"
        awaited = self._awaited(membership)
        self._waited_for = {member: self._waited_for.get(member, self._now) for member in awaited}
        for member, since in self._waited_for.items():
            if self._now - since > self._limits.report:
                found.setdefault(member, f"the other ranks have waited for it for {self._now - since:.0f} s")
        return found

    def _awaited(self, membership: Membership) -> list[int]:
        """Those that others wait for: members of a view that is over, processes of the first view once one is ready."""
        if membership.view is None:
            return list(membership.expected) if membership.newcomers else []
        return [*membership.unreported, *membership.expected]
