"""What the end of a process means for a job that goes on when ranks die: a death, a failure, or
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_ring.elastic.membership import counted_ranks
from lightning_ring.elastic.steward import Steward
from lightning_ring.job.exit import say
from lightning_ring.launch.child import Child
from lightning_ring.launch.orphan_guard import OrphanGuard
from lightning_ring.launch.remote import RemoteChild
from lightning_ring.launch.slots import Slots
from lightning_ring.launch.supervisor import exit_code, signal_name


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


class Deaths:
    """``limits``: of respawns, `None` for none.

    Attributes:
        told: One line for each death, with the time of day.
        given_up: One line for each slot in which no further process is started.
    """

    def __init__(self, limits: RespawnLimits | None) -> None:
        self.told: list[str] = []
        self.given_up: dict[int, str] = {}
        self._respawns = Respawns(limits) if limits is not None else None

    @property
    def pending(self) -> int:
        """The number of processes that are to start later."""
        return self._respawns.pending if self._respawns is not None else 0

    def take_due(self, now: float) -> list[int]:
        """The slots whose next process is to start now."""
        return self._respawns.take_due(now) if self._respawns is not None else []

    def add(self, death: str, slot: int, lived: float, *, replaced: bool) -> str:
        """Note ``death``, a sentence without its end; ``replaced`` if the limits allow. Returns
        the rest of it.
        """
        self.told.append(f"{time.strftime('%H:%M:%S')} {death}")
        if self._respawns is None or not replaced:
            return ""
        if self._respawns.died(slot, time.monotonic(), lived):
            return ", and a new process replaces it"
        count = self._respawns.in_a_row[slot]
        self.given_up[slot] = (
            f"slot {slot} stays empty, {count} processes died one after the other; the last: "
            f"{death}"
        )
        return f"; no other process replaces it, after {count} deaths in a row"


_CODES_OF_SIGNALS = range(129, 193)  # a shell's, for a program that a signal ended


@dataclass(slots=True, eq=False)
class JobProcess:
    """A process of the job. Its ``slot`` is the same as that of the process that it replaces."""

    number: int
    slot: int
    child: Child | RemoteChild
    joins: bool  # a job whose ranks train already
    started: float
    guarded: bool = False
    identified: bool = False
    removed: str = ""  # why the steward had it killed, where that is not its own death
    kill_at: float | None = None  # when what is left of its session ends
    died: float | None = None  # when it was seen to be dead
    ended: bool = False  # the kernel has told its exit code, which may take seconds longer
    outlived: bool = False  # the job went on without it, and ends for another reason, if it ends

    @property
    def name(self) -> str:
        child = self.child
        where = f"host {child.host.host.name}, " if isinstance(child, RemoteChild) else ""
        return f"{child.name} ({where}pid {child.program or child.pid})"

    def death(self, code: int, reason: str) -> str:
        """Who died how, without a full stop. ``reason``: what else is known, or nothing."""
        how = (
            f"was killed by signal {-code} ({signal_name(-code)})"
            if code < 0
            else f"ended with exit code {code}"
        )
        if isinstance(self.child, RemoteChild) and self.child.is_lost:
            how = "is lost with its host"
        return f"{self.name} {how}" + f" ({reason})" * bool(reason)


def by_signal(code: int) -> bool:
    """Whether a signal ended the program, also as a shell reports it (128 + n)."""
    return code < 0 or code in _CODES_OF_SIGNALS


_WRAPPER_SECONDS = 2.0  # for the end of a wrapper whose rank has died


@dataclass(slots=True)
class ProcessEnds:
    """Tells ``steward`` who is dead, and ends the job where a process of ``processes`` has failed
    by itself.

    The two are told apart by the exit code: a signal's, also as a shell reports it (128 + n), is a
    death. A process that joins may fail until it has finished a step: the others do not need it. An
    exit code of 0 is a failure where the rank has not said that it has finished, and so is each
    death once a rank has left its fit. ``ending()``: whether the job was told to stop, or a process
    has failed.

    Attributes:
        failing: The process that ended the job without a word.
        failed: How it ended.
        left: Who ended with exit code 0 and had not finished.
    """

    processes: Sequence[JobProcess]
    steward: Steward
    deaths: Deaths
    slots: Slots
    guard: OrphanGuard
    ending: Callable[[], bool]
    failing: JobProcess | None = field(default=None, init=False)
    failed: str = field(default="", init=False)
    left: str = field(default="", init=False)

    @property
    def is_over(self) -> bool:
        return self.ending() or self.steward.ended is not None

    @property
    def living(self) -> list[JobProcess]:
        """The running processes, as far as they are known to run."""
        return [
            process
            for process in list(self.processes)
            if process.child.is_running and process.died is None
        ]

    def look_at(self, process: JobProcess, now: float) -> None:
        """Find out whether ``process``, which has not ended, is dead or has ended meanwhile."""
        child, number, steward = process.child, process.number, self.steward
        if not child.is_started:
            return
        if not process.guarded and isinstance(child, Child):
            process.guarded = True
            self.guard.watch(child.pid)
        if not process.identified and number in steward.pids:
            process.identified = True
            child.identify(steward.pids[number])
        if process.died is None and child.is_dead():
            process.died = now
            steward.step(0)  # its last words may have arrived
            if number not in steward.membership.finishers:
                failure = child.failure()
                if failure and not by_signal(failure) and not self._is_new(process):
                    self._fail(process, failure)  # before the others connect anew
                steward.gone(number, "its process is ending")
                process.kill_at = now + _WRAPPER_SECONDS
        if (code := child.poll()) is not None:
            self.note_end(process, code)
        elif process.kill_at is not None and now >= process.kill_at:
            process.kill_at = now + _WRAPPER_SECONDS
            child.kill_session()

    def note_end(self, process: JobProcess, code: int) -> None:
        """A process has ended: tell whether the job outlives that, and have another one started
        in its slot.
        """
        if process.ended:
            return
        process.ended = True
        steward, number = self.steward, process.number
        if process.died is None:
            steward.step(0)  # its last words may have arrived
        steward.gone(number, "its process has ended")
        finished = number in steward.membership.finishers
        if not finished:
            process.child.kill_session()  # what it started
        if isinstance(process.child, Child):
            self.guard.forget(process.child.pid)
        is_new = self._is_new(process)
        if self.is_over or (finished and code == 0):
            no_failure = by_signal(code) or (code and is_new and steward.membership.finished)
            # the job ends for another reason
            process.outlived = bool(no_failure) and not self.ending()
            ends_as_the_job = code == steward.exit_code and not steward.membership.finished
            if process.outlived and not ends_as_the_job:
                self._note_death(process, code)
            return
        if code == 0:
            self.left = self.left or process.name
            return
        others = (other.child.poll() for other in self.processes if other is not process)
        late = number in steward.membership.late
        if any(not self.processes[one].ended for one in steward.membership.late):
            # it follows from a death that ends the job, and is still to be noted
            process.outlived = True
            self._note_death(process, code)
            return
        if (by_signal(code) or is_new) and not late and any(other in (None, 0) for other in others):
            process.outlived = True
            self._note_death(process, code)
        elif not finished:
            self._fail(
                process,
                code,
                ", after the training had ended: what it had yet to do is missing" * late,
            )

    def is_outlived(self, process: JobProcess, code: int) -> bool:
        """Whether the job has an exit code of its own although ``process`` ended with ``code``."""
        self.note_end(process, code)
        # the others end because of it, perhaps earlier
        return process.outlived or self.failing not in (None, process)

    def kill(self, number: int, why: str, after: float) -> None:
        """The steward has removed process ``number``, which gets ``after`` seconds to end by
        itself.
        """
        process = self.processes[number]
        if process.died is not None or process.child.is_dead():
            return
        process.kill_at = time.monotonic() + after
        if not after:
            process.removed = why
            process.child.kill_session()

    def _is_new(self, process: JobProcess) -> bool:
        """Whether it came to a job that trains, and has finished no step of it yet."""
        return process.joins and not self.steward.membership.was_member(process.number)

    def _fail(self, process: JobProcess, code: int, when: str = "") -> None:
        """It may not have said so itself, as an uncaught exception does: os._exit, a C library."""
        if not self.is_over:
            self.failing, self.failed = process, process.death(code, "")
            self.steward.end(self.failed + when, exit_code=exit_code(code))

    def _note_death(self, process: JobProcess, code: int) -> None:
        death = process.death(
            code, process.removed or self.steward.last_words.get(process.number, "")
        )
        trains = not self.is_over and not self.steward.membership.takes_no_more
        fits = process.number not in self.steward.turned_away
        replaced = trains and fits and self.slots.is_open(process.slot)
        rest = self.deaths.add(
            death, process.slot, time.monotonic() - process.started, replaced=replaced
        )
        say(f"{death}; {counted_ranks(len(self.living))} left{rest}")
