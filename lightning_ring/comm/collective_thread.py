"""An engine for collectives that block: one thread that runs them in the order of the calls, beside
the computation.

`collective_queue` says why there are two.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy, nothing, transport_error
from lightning_ring.errors import CollectiveError, RingError

BROKEN_SECONDS = 0.5
LATE_SECONDS = 0.1  # with less, a slightly slower rank would be late in every step
STUCK_SECONDS = 5.0  # past the timeout: the thread itself hangs inside the transport


class CollectiveThread:
    """Runs jobs first in, first out; the first error ends every job, under way or to come."""

    def __init__(self, policy: WaitPolicy) -> None:
        self.policy = policy
        self.running: ThreadWork | None = None
        self.last: tuple[str, float] | None = None
        self._jobs: SimpleQueue[ThreadWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._num_submitted = self._num_finished = 0
        policy.engines.append(weakref.ref(self))

    @property
    def idle(self) -> bool:
        return self._num_finished == self._num_submitted

    @property
    def busy(self) -> bool:
        """Whether the thread has work; never in a forked child, which has no thread."""
        return not self.idle and self._thread is not None and self._thread.is_alive()

    def is_run_by(self, thread: threading.Thread) -> bool:
        return thread is self._thread

    def under_way(self) -> tuple[str, float] | None:
        work = self.running
        return None if work is None else (work.description, work.started)

    def submit(self, description: str, run: Callable[[], None]) -> ThreadWork:
        self.check_open(description)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ring-collectives", daemon=True)
            self._thread.start()
        work = ThreadWork(self, description, run)
        self._num_submitted += 1
        self._jobs.put(work)
        return work

    def check_open(self, description: str) -> None:
        """Raise if the communicator is broken or closed."""
        self.policy.raise_if_broken()
        if self._closed:
            raise CollectiveError(f"{description}: this communicator was closed; build a new one.")

    def while_waiting(self, peers: Sequence[int]) -> float:
        """Called by a transport that waits for ``peers``; returns the seconds left."""
        self.policy.raise_if_broken()
        work = self.running
        if work is None:
            return self.policy.seconds
        work.waits_for = peers
        left = work.started + self.policy.seconds - time.monotonic()
        if left <= 0:
            raise self.policy.timeout_error(work.description, peers)
        return left

    def wait(self, work: ThreadWork) -> None:
        """Called in the user's thread."""
        while not work.finished.wait(CHECK_SECONDS):
            self.policy.check_peers()
            if self.policy.error is not None and not work.finished.wait(BROKEN_SECONDS):
                # The thread is inside a wait that nothing ends.
                self.policy.raise_named(self.policy.error)
            running = self.running
            if running is None:
                continue
            seconds = time.monotonic() - running.started
            self.tell_late()
            running.num_warnings += self.policy.warn_of_stall(
                running.description, seconds, running.waits_for, running.num_warnings
            )
            if seconds > self.policy.seconds + STUCK_SECONDS:
                raise self.policy.fail(
                    self.policy.timeout_error(running.description, running.waits_for)
                )
        if work.error is not None:
            self.policy.raise_named(work.error)

    def tell_late(self) -> None:
        """Call `ThreadWork.late` of the work that runs, once it is."""
        running = self.running
        if running is not None and time.monotonic() - running.started >= LATE_SECONDS:
            late, running.late = running.late, nothing
            late()

    def close(self) -> bool:
        """Let what is queued finish or fail, then end the thread. Returns whether it ended.

        Waits up to the timeout, or a moment if the communicator broke.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return True
        until = time.monotonic() + self.policy.seconds + STUCK_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            # A failed peer ends the wait.
            with contextlib.suppress(RingError):
                self.policy.check_peers()
            if self.policy.error is not None:
                self._thread.join(BROKEN_SECONDS)
                break
            self._thread.join(CHECK_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            if self.policy.error is None:
                self._run_one(work)
            self._num_finished += 1
            work.finish(self.policy.error)

    def _run_one(self, work: ThreadWork) -> None:
        work.started = time.monotonic()
        self.running = work
        try:
            if work.inference:
                with torch.inference_mode():
                    work.run()
            else:
                work.run()
        except RingError as error:
            self.policy.fail(error)
        except BaseException as error:
            self.policy.fail(transport_error(work.description, error))
        self.last, self.running = (work.description, work.started), None


@dataclass(slots=True, eq=False)
class ThreadWork:
    """A `Work` of a `CollectiveThread`."""

    _thread: CollectiveThread
    description: str
    run: Callable[[], None]
    # A mode of the caller's thread.
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    started: float = 0.0
    waits_for: Sequence[int] = ()
    num_warnings: int = 0
    ended: float | None = None
    late: Callable[[], object] = nothing
    error: RingError | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self._thread.wait(self)

    def done(self) -> bool:
        if not self.finished.is_set():
            self._thread.tell_late()
        return self.finished.is_set() or self._thread.policy.error is not None

    def finish(self, error: RingError | None) -> None:
        self.error = error
        self.run = nothing  # lets go of the tensors
        self.ended = time.perf_counter()
        self.finished.set()
