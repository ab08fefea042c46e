"""What the end of a process means for a job that goes on when ranks die: a death, a failure, or
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_ring.job.exit import say
from lightning_ring.launch.child import Child
from lightning_ring.launch.deaths import Deaths
from lightning_ring.launch.job_process import JobProcess, by_signal
from lightning_ring.launch.orphan_guard import OrphanGuard
from lightning_ring.launch.slots import Slots
from lightning_ring.launch.supervisor import exit_code
from lightning_ring.membership.steward import Steward

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
        say(f"{death}; {len(self.living)} ranks are left{rest}")
