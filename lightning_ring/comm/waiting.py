"""How a communicator waits for other ranks: the timeout, the check on peers, and the first error,
which stays.

Every wait ends: by the result, by ``timeout``, or because another rank failed. MPI would wait by
spinning, and Gloo until an exception. Our threads spin for 50 µs and then sleep a tenth of the time
waited, 1 ms at most, so that backward keeps its core. A thread that returns from C++ while the
interpreter ends aborts the process; an exit handler therefore ends all waits first.

A GPU's collectives are waited for when the host reads what they carry (`Communicator.read`, at
least the stop flag of the backward before last): such a wait polls an event and ends like any
other. A read by other means (``loss.item()``) waits inside the driver until torch's watchdog, or
the job's, ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from lightning_ring.errors import CollectiveError, RingError

DEFAULT_TIMEOUT = timedelta(minutes=30)
SPIN_SECONDS = 50e-6
# of the time waited so far: a late answer is late by a tenth, and the waiting costs next to nothing
SLEEP_SHARE = 0.1
LONGEST_SLEEP_SECONDS = 1e-3
CHECK_SECONDS = 0.02  # how often a waiting rank asks whether its peers are alive
GRACE_SECONDS = 1.0  # a transport often sees a dead peer before the job's watch can name it

_log = logging.getLogger("lightning_ring")

Check = Callable[[], None]


class TransportError(CollectiveError):
    """An error of MPI or torch.distributed. The cause is often a peer that failed, which a check
    may name later.
    """


class Engine(Protocol):
    """Runs the collectives of one communicator in order. Its progress can be read from any
    thread.
    """

    @property
    def last(self) -> tuple[str, float] | None:
        """The collective that ended last, and when it had begun, by the monotonic clock."""

    def under_way(self) -> tuple[str, float] | None:
        """The first collective that was called and has not ended, and since when."""


class StallReports(Protocol):
    """Asks all ranks for the collective that each is in (`lightning_ring.job.stalls`)."""

    def notice(self, description: str, seconds: float) -> None:
        """A collective is late; returns at once."""

    def verdict(self, description: str, late: str, advice: str) -> str:
        """The text of every rank's error for a collective that is too late: ``late``, all
        answers, ``advice``.
        """


class WaitPolicy:
    """How long collectives wait, and the first error, shared by all collectives of a communicator.

    Several communicators may share one policy: the first error of any of them then ends the others'
    collectives.

    ``check`` raises a `RingError` once a peer is known to have failed. A rank that has waited for
    ``stall_warning`` logs what it waits for, once a collective; with ``stalls``, all ranks are
    asked instead, and again after twice, four times, eight times as long. ``verdict`` is the error
    of a collective that was late on some rank, for all ranks.
    """

    def __init__(
        self,
        timeout: timedelta = DEFAULT_TIMEOUT,
        check: Check | None = None,
        stall_warning: timedelta | None = None,
    ) -> None:
        self.timeout = timeout
        self.opening = timedelta.max  # for which a group's connections may take to come up
        self.grace = GRACE_SECONDS  # for which a collective goes on although a peer has failed
        self.stall_warning = stall_warning
        self.check = check
        self.error: RingError | None = None
        self.stalls: StallReports | None = None
        self.verdict: RingError | None = None
        self.engines: list[weakref.ref[Engine]] = []
        self._lock = threading.Lock()
        self._doomed_since: float | None = None

    @property
    def seconds(self) -> float:
        return self.timeout.total_seconds()

    def fail(self, error: RingError) -> RingError:
        """Break the communicator with ``error``, unless an earlier one did; returns the one that
        holds.
        """
        with self._lock:
            if self.error is None:
                self.error = error
            return self.error

    def end(self, verdict: RingError) -> None:
        """Break the communicator, and end waits that a transport cannot interrupt, because a
        collective is too late.
        """
        self.verdict = self.fail(verdict)

    def raise_if_broken(self) -> None:
        if self.error is not None:
            raise self.error

    def check_peers(self) -> None:
        if self.verdict is not None:
            raise self.verdict
        if self.check is None:
            return
        try:
            self.check()
        except RingError as error:
            # a peer that failed right after this collective has sent its part of it: what is on the
            # way may arrive, and this rank then meets the same error itself
            self._doomed_since = self._doomed_since or time.monotonic()
            if time.monotonic() - self._doomed_since >= self.grace:
                raise self.fail(error) from None

    def raise_named(self, error: RingError) -> None:
        """Raise ``error``; a bare transport error gives the check a moment to say which rank
        failed.
        """
        if isinstance(error, TransportError) and self.check is not None:
            until = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < until:
                try:
                    self.check()
                except RingError as named:
                    self.error = named
                    raise named from error
                time.sleep(CHECK_SECONDS)
        raise error

    def warn_of_stall(
        self, description: str, seconds: float, peers: Sequence[int] = (), before: int = 0
    ) -> bool:
        """Report a wait of ``seconds``, reported ``before`` times, if the next report is due;
        returns whether it is.
        """
        if self.stall_warning is None or seconds < self.stall_warning.total_seconds() * (
            2 ** (before + 1) - 1
        ):
            return False
        if self.stalls is not None:
            self.stalls.notice(description, seconds)
            return True
        if before:
            return False
        whom = f" for {ranks_text(peers)}" if peers else ""
        _log.warning(
            "%s has waited %.0f s%s; it fails after %g s.", description, seconds, whom, self.seconds
        )
        return True

    def timeout_error(self, description: str, peers: Sequence[int] = ()) -> CollectiveError:
        """The error of a collective that ran out of time. With `stalls` it takes a few seconds
        to ask all ranks.
        """
        late = f"{description} did not finish within {self.seconds:g} s"
        waits = f": still waiting for {ranks_text(peers)}" if peers else ""
        advice = "If a rank is only slow, give a longer timeout."
        if self.stalls is not None:
            return CollectiveError(self.stalls.verdict(description, late + waits, advice))
        return CollectiveError(
            f"{late}{waits or ': it is not known which ranks are missing'}. A rank left the job, "
            f"is busy elsewhere or never called this collective: see that rank's output. {advice}"
        )


def poll_until(test: Callable[[], bool], while_waiting: Callable[[], object]) -> None:
    """Poll ``test`` without taking a core from the computation: spin a moment, then sleep a tenth
    of the time waited.

    MPI's own waits spin for as long as they last; Gloo's end in an exception where their time is
    up, which is made at backward's cost. ``while_waiting`` is called every 20 ms and may raise.
    """
    if test():
        return
    began = time.perf_counter()
    next_check = CHECK_SECONDS
    while not test():
        waited = time.perf_counter() - began
        if waited > next_check:
            while_waiting()
            next_check = waited + CHECK_SECONDS
        if waited > SPIN_SECONDS:
            time.sleep(min(waited * SLEEP_SHARE, LONGEST_SLEEP_SECONDS))


def let_senders_finish() -> None:
    """Keep Gloo's threads from taking the core of a thread that sends.

    While another thread writes to a connection, Gloo's asks for it again and again, for as long as
    Linux lets it run: where they share a core, for milliseconds (`handleEvents` in
    ``gloo/transport/tcp/pair.cc``). In batch scheduling it waits for its turn. Compressors, which
    send many short messages, gain from it. Small models without one lose at 1 Gbit/s.
    """
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(OSError):  # a thread that has ended
            if (task / "comm").read_bytes() == b"gloo_tcp_loop\n":
                thread = int(task.name)
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # else the user has chosen
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def transport_error(description: str, error: BaseException) -> TransportError:
    """What a transport raised, as an error that names the collective."""
    wrapped = TransportError(
        f"{description} failed: {type(error).__name__}: {error}. Most likely another rank failed "
        "first: see its output."
    )
    wrapped.__cause__ = error
    return wrapped


def nothing(*_: object) -> None:
    """For a callback that nobody needs."""


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2, 5``; of many, the first ten."""
    distinct = sorted(set(ranks))
    shown = ", ".join(map(str, distinct[:10])) + (", …" if len(distinct) > 10 else "")
    return f"rank{'s' if len(distinct) > 1 else ''} {shown}"
