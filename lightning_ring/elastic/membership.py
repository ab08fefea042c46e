"""Views, and what the ranks report between them, without sockets and processes.

A rank steps its optimizer only after a commit barrier, which it enters with the complete averages
of the step. Once some rank has finished a step, every other rank of its view has finished it too or
holds its averages. So a finished step is never lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_ring.errors import PeerFailedError, RingError, StateLostError


def counted_ranks(number: int) -> str:
    """``1 rank``, ``3 ranks``: for messages."""
    return f"{number} rank" if number == 1 else f"{number} ranks"


class GenerationOver(PeerFailedError):
    """A rank of this generation died, or others wait to take part. A view follows."""


class JobEnded(PeerFailedError):
    """The steward has ended the job, with ``exit_code``: 0 if all had finished the training."""

    def __init__(self, why: str, exit_code: int = 1) -> None:
        super().__init__(why)
        self.exit_code = exit_code

    @property
    def finished(self) -> bool:
        return self.exit_code == 0


class TooFewRanks(JobEnded):
    """The job had too few ranks for too long: the remaining ranks save what they have."""


@dataclass(frozen=True, slots=True)
class View:
    """The ranks of one generation.

    ``members`` are numbers of processes, by rank; a number is never given twice. ``step`` is the
    number of optimizer steps that all members except the ``newcomers`` have finished when the
    generation begins; a member that finished one less finishes it first. `None`: no member has
    state. ``last``: why the job ends with this view, in which its members only save their state.
    """

    generation: int
    members: tuple[int, ...]
    step: int | None = None
    newcomers: tuple[int, ...] = ()
    last: str = ""

    def as_message(self) -> dict[str, Any]:
        runs = {"members": _as_runs(self.members), "newcomers": _as_runs(self.newcomers)}
        return {"kind": "view", **asdict(self), **runs}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> View:
        members, newcomers = (_from_runs(message[name]) for name in ("members", "newcomers"))
        return cls(message["generation"], members, message["step"], newcomers, message["last"])


def _as_runs(numbers: Iterable[int]) -> list[list[int]]:
    """First and last of each run of consecutive ``numbers``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def _from_runs(runs: Iterable[list[int]]) -> tuple[int, ...]:
    return tuple(number for first, last in runs for number in range(first, last + 1))


class DisagreementError(RingError):
    """Ranks reported steps that the commit barrier rules out."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank stands when its view is over.

    ``step``: number of optimizer steps that it has finished; `None` for a newcomer. ``complete``:
    whether it holds the complete averages of the next step. ``parted``: whether its state is a part
    of the training's. ``between``: whether newcomers can come in where it stands.
    """

    step: int | None = None
    complete: bool = False
    parted: bool = False
    between: bool = False


def agreed_step(reports: Mapping[int, Report]) -> int | None:
    """The number of steps that every rank finishes before the next view; `None` without state.

    A rank that reported one step less finishes the step that it holds complete averages of. The
    step under way counts if every rank can finish it. Otherwise all ranks do it again.

    Raises:
        DisagreementError: A rank cannot finish a step that another rank has finished.
    """
    standing = {
        rank: (report.step, report.complete)
        for rank, report in reports.items()
        if report.step is not None
    }
    if not standing:
        return None
    most = max(step for step, _ in standing.values())
    behind = {rank: report for rank, report in standing.items() if report[0] < most}
    lost = sorted(
        rank for rank, (step, complete) in behind.items() if step != most - 1 or not complete
    )
    if lost:
        found = ", ".join(
            f"{rank}: {step}{' (complete)' * complete}"
            for rank, (step, complete) in standing.items()
        )
        raise DisagreementError(
            f"After an interruption one rank has finished step {most}, and ranks {lost} cannot "
            f"finish it (steps by member: {found}). Every rank has to pass the commit barrier "
            "before it steps its optimizer."
        )
    return most + (not behind and all(complete for _, complete in standing.values()))


class Membership:
    """Collects reports and deaths, and makes the next view once all that it depends on is known.

    A view ends when a member is removed, or when a member reports because newcomers wait. The next
    one begins when every remaining member has reported, every removed one is *fenced* (seen to be
    dead), and there are ``min_ranks`` of them.
    """

    def __init__(self, min_ranks: int = 1, max_ranks: int | None = None) -> None:
        self.view: View | None = None
        # members of the last view in which nobody had state
        self.first_ranks = 0
        self.stopping = True
        self._min_ranks = min_ranks
        self._max_ranks = max_ranks
        self._members: dict[int, None] = {}  # of the view, by rank
        self.expected: set[int] = set()
        self._reports: dict[int, Report] = {}
        self._unfenced: set[int] = set()  # removed, and not yet seen to be dead
        self._gone: set[int] = set()  # removed, or finished
        self.finishers: set[int] = set()  # members that have finished the training
        self._seen: set[int] = set()
        self._untried: set[int] = set()  # of those: newcomers that have finished no step yet
        self._outside: set[int] = set()
        # members that died when a member had left its fit: nobody can go on without them
        self.late: set[int] = set()
        self._has_state = False
        self._last = ""  # why the job ends with the next view

    @property
    def members(self) -> list[int]:
        return list(self._members)

    @property
    def newcomers(self) -> list[int]:
        return sorted(self._reports.keys() - self._members.keys())

    @property
    def unreported(self) -> list[int]:
        """Members that the next view waits for."""
        return (
            [member for member in self._members if member not in self._reports]
            if self.stopping
            else []
        )

    @property
    def admits(self) -> bool:
        """Whether newcomers wait while a view is in force."""
        has_room = self._max_ranks is None or len(self._members) < self._max_ranks
        return not self.stopping and has_room and bool(self._members) and bool(self.newcomers)

    @property
    def finished(self) -> bool:
        return bool(self.finishers) and not self._members and not self.late

    @property
    def takes_no_more(self) -> bool:
        """Whether a process that starts now comes too late."""
        return bool(self.finishers or self._outside)

    @property
    def below_min_ranks(self) -> bool:
        """Whether only too few ranks prevent the next view."""
        return (
            self._is_settled()
            and len(self._reports) < self._min_ranks
            and not (self._last or self.late)
        )

    def end_with_last_view(self, why: str) -> bool:
        """Below ``min_ranks``: let the remaining ranks meet once more, if each has a part of the
        state.

        Returns whether they do.
        """
        if any(report.parted and report.step is not None for report in self._reports.values()):
            self._last = why
        return bool(self._last)

    @property
    def last_word(self) -> str:
        """Why the job is over, once its last view has no members any more."""
        return self._last if not self._members else ""

    def knows(self, member: int) -> bool:
        return (
            member in self.expected or member in self._seen or member in self._reports
        ) and member not in self._gone

    def was_member(self, member: int) -> bool:
        return member in self._seen and member not in self._untried

    def expect(self, member: int) -> None:
        """A process was started. The first view waits for all of them."""
        self.expected.add(member)

    def report(self, member: int, generation: int, report: Report) -> None:
        """``member`` is out of every collective of ``generation`` (-1 for a newcomer)."""
        if member in self._gone:
            return
        if member in self._members:
            if self.view is None or generation != self.view.generation:
                return
            self.stopping = True
        self.expected.discard(member)
        if report.step is not None:
            self._has_state = True
            self.take_part(member)
        self._reports[member] = report

    def remove(self, member: int) -> bool:
        """Remove ``member`` for good. Returns whether that is news; `fenced` has to follow."""
        if member in self._gone:
            return False
        if member in self._members:
            self.stopping = True
            if self._outside and self.was_member(member):
                self.late.add(member)
        self._drop(member)
        self._unfenced.add(member)
        return True

    def fenced(self, member: int) -> None:
        self.remove(member)
        self._unfenced.discard(member)

    def take_part(self, member: int) -> None:
        self._untried.discard(member)

    def leave_fit(self, member: int, left: bool) -> None:
        """``member`` has ``left`` its fit, and joins no view before it begins another one.

        Nobody can take the place of a member that dies then.
        """
        if not left:
            self._outside.discard(member)
            return
        self._outside.add(member)
        if self.stopping and self.view is not None:
            dead = (self._gone - self.finishers).intersection(self.view.members)
            self.late |= {one for one in dead if self.was_member(one)}

    def finish(self, member: int) -> None:
        self._drop(member)
        self.finishers.add(member)

    def next_view(self) -> View | None:
        """The next view, now in force; `None` as long as something is missing.

        Raises:
            DisagreementError: As `agreed_step`.
            StateLostError: Only newcomers are left.
        """
        if not self._is_settled() or (len(self._reports) < self._min_ranks and not self._last):
            return None
        if self.last_word or self.late:  # newcomers come too late; the job has failed
            return None
        stay = self._who_stays()
        let_in = sorted(self._reports.keys() - set(stay)) if self._lets_in(stay) else []
        members = [*stay, *let_in][: self._max_ranks]
        if self._has_state and all(self._reports[member].step is None for member in members):
            raise StateLostError(
                f"Every rank that held the training's state has died; the {len(members)} that wait "
                "have none. Start the job again from its last checkpoint."
            )
        reports = {member: self._reports.pop(member) for member in members}
        step = agreed_step(reports)
        newcomers = (
            ()
            if step is None
            else tuple(member for member in members if reports[member].step is None)
        )
        is_new = set(newcomers).__contains__
        order = sorted(members, key=is_new)  # stable: rank 0 has state
        if step is None:
            self.first_ranks = len(members)
        generation = 0 if self.view is None else self.view.generation + 1
        self.view = View(generation, tuple(order), step, newcomers, self._last)
        self._members = dict.fromkeys(order)
        self.stopping = False
        self._seen.update(members)
        self._untried.update(newcomers)
        return self.view

    def _who_stays(self) -> list[int]:
        """Members that are no newcomers. Members without state come in as newcomers do."""
        begins = not any(self._reports[member].step for member in self._members)
        return [one for one in self._members if begins or self._reports[one].step is not None]

    def _lets_in(self, stay: list[int]) -> bool:
        reports = [self._reports[member] for member in stay]
        return not self._last and all(one.between or one.step is None for one in reports)

    def _is_settled(self) -> bool:
        if not self.stopping or self._unfenced or not self._reports:
            return False
        if self.view is None and self.expected:
            return False
        return self._members.keys() <= self._reports.keys()

    def _drop(self, member: int) -> None:
        self._gone.add(member)
        self._members.pop(member, None)
        self.expected.discard(member)
        self._reports.pop(member, None)
