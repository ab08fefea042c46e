"""Who takes part: the state of the membership, without sockets and processes. One `View` follows the other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_ring.errors import RingError
from lightning_ring.membership.agreement import Report, agreed_step


class StateLostError(RingError):
    """Every rank that held the training's state has died."""


@dataclass(frozen=True, slots=True)
class View:
    """The ranks of one generation.

    ``members`` are numbers of processes, by rank; a process keeps its number, and no other process gets it. ``step`` is
    the number of optimizer steps that all members but the ``newcomers`` have finished when the generation begins: a
    member that finished one less finishes it first. `None`: no member has state, the training begins.
    """

    generation: int
    members: tuple[int, ...]
    step: int | None = None
    newcomers: tuple[int, ...] = ()

    def as_message(self) -> dict[str, Any]:
        return {"kind": "view", **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> View:
        members, newcomers = tuple(message["members"]), tuple(message["newcomers"])
        return cls(message["generation"], members, message["step"], newcomers)


class Roster:
    """Collects reports and deaths, and makes the next view once all that it depends on is known.

    A view ends when a member dies, or when a member reports because newcomers wait. The next one begins when every
    remaining member has reported, every dead one was *seen* to be dead, and there are ``min_ranks`` of them. So nobody
    of an earlier view can still write into memory that the next view uses.
    """

    def __init__(self, min_ranks: int = 1, max_ranks: int | None = None) -> None:
        self.view: View | None = None
        self.stopping = True  # no view is in force
        self._min_ranks = min_ranks
        self._max_ranks = max_ranks
        self.expected: set[int] = set()  # started, and not ready yet
        self._reports: dict[int, Report] = {}
        self._dying: set[int] = set()  # counted out, and not yet seen to be dead
        self._absent: set[int] = set()  # dead, or finished
        self.finishers: set[int] = set()  # members that have finished the training
        self._has_state = False

    @property
    def members(self) -> list[int]:
        """The members of the view that still take part, by rank."""
        members = self.view.members if self.view is not None else ()
        return [member for member in members if member not in self._absent]

    @property
    def newcomers(self) -> list[int]:
        """Processes that wait to take part, in the order of their numbers."""
        return sorted(self._reports.keys() - set(self.members))

    @property
    def admits(self) -> bool:
        """Whether a view is in force that newcomers wait to enter, so that its members stop at the end of a step."""
        has_room = self._max_ranks is None or len(self.members) < self._max_ranks
        return not self.stopping and has_room and bool(self.members) and bool(self.newcomers)

    @property
    def finished(self) -> bool:
        """Whether every member of the view that did not die has finished the training."""
        return bool(self.finishers) and not self.members

    @property
    def starved(self) -> bool:
        """Whether nothing but too few ranks is in the way of the next view."""
        return self._is_settled() and len(self._reports) < self._min_ranks

    def expect(self, member: int) -> None:
        """A process was started. The first view waits for all of them."""
        self.expected.add(member)

    def report(self, member: int, generation: int, report: Report) -> None:
        """``member`` is out of every collective of ``generation`` (-1 for a newcomer) and waits for the next view."""
        if member in self._absent:
            return
        if member in self.members:
            if self.view is None or generation != self.view.generation:
                return
            self.stopping = True
        self.expected.discard(member)
        self._has_state |= report.step is not None
        self._reports[member] = report

    def lose(self, member: int) -> bool:
        """Count ``member`` out, for good. Returns whether that is news; `bury` has to follow."""
        if member in self._absent:
            return False
        if member in self.members:
            self.stopping = True
        self._drop(member)
        self._dying.add(member)
        return True

    def bury(self, member: int) -> None:
        """``member`` was seen to be dead: it writes nothing any more."""
        self.lose(member)
        self._dying.discard(member)

    def finish(self, member: int) -> None:
        """``member`` has finished the training; what it has sent is on its way."""
        self._drop(member)
        self.finishers.add(member)

    def next_view(self) -> View | None:
        """The next view, which is in force from now on; `None` as long as something is missing.

        Raises:
            DisagreementError: As `agreed_step`.
            StateLostError: Only newcomers are left.
        """
        if not self._is_settled() or len(self._reports) < self._min_ranks:
            return None
        members = [*self.members, *self.newcomers][: self._max_ranks]
        if self._has_state and all(self._reports[member].step is None for member in members):
            raise StateLostError(
                f"Every rank that held the training's state has died; the {len(members)} that wait have none. Start "
                "the job again from its last checkpoint."
            )
        reports = {member: self._reports.pop(member) for member in members}
        step = agreed_step(reports)
        newcomers = () if step is None else tuple(member for member in members if reports[member].step is None)
        order = sorted(members, key=lambda member: member in newcomers)  # stable: rank 0 has state
        generation = 0 if self.view is None else self.view.generation + 1
        self.view = View(generation, tuple(order), step, newcomers)
        self.stopping = False
        return self.view

    def _is_settled(self) -> bool:
        if not self.stopping or self._dying or not self._reports:
            return False
        if self.view is None and self.expected:
            return False
        return all(member in self._reports for member in self.members)

    def _drop(self, member: int) -> None:
        self._absent.add(member)
        self.expected.discard(member)
        self._reports.pop(member, None)
