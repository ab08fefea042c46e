"""An engine for collectives that are steps: run in the order of the calls by the first thread that
waits for them.

That thread is the caller, or one in the background. A short collective then costs no change of
threads, and one that nobody waits for goes on during the computation.

`CollectiveThread` is the other engine: it runs whole functions, since the waits of MPI, Gloo and
torch are calls that a queue cannot leave and resume. Over shared memory it would be slower.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_ring.comm.waiting import (
    CHECK_SECONDS,
    LONGEST_SLEEP_SECONDS,
    SLEEP_SHARE,
    WaitPolicy,
    transport_error,
)
from lightning_ring.errors import CollectiveError, RingError

_NOTHING = nullcontext()
WAKE_SECONDS = 1e-3  # a caller that waits at once has begun by then
EXIT_SECONDS = 1.0
STUCK_SECONDS = 5.0  # past the timeout: the thread itself hangs
# Two ranks may share a core for a while: the one that spins keeps the other from answering.
SPIN_SECONDS = 10e-6
YIELD_SECONDS = 100e-6  # until then a waiting thread only lets others run
# A sleep lasts 60 µs at least, and two ranks could sleep in turn, each for the other. A caller,
# which has nothing else to do, therefore yields for longer first.
CALLER_YIELD_SECONDS = 2e-3

# a sleep of 0 may set a timer
_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))

Steps = Generator[int, None, None]
"""A collective: it yields the number of a round, and goes on once that is reached."""


@dataclass(slots=True, eq=False)
class QueuedWork:
    """A `Work` of a `CollectiveQueue`."""

    _queue: CollectiveQueue
    description: str
    steps: Steps | None
    awaits: int = 0
    submitted: float = field(default_factory=time.monotonic)
    # A mode of the caller's thread.
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    started: float = 0.0
    num_warnings: int = 0
    over: bool = False
    ended: float | None = None
    error: RingError | None = None

    def wait(self) -> None:
        if not self.over:
            self._queue.finish(self)
        if self.error is not None:
            self._queue.policy.raise_named(self.error)

    def done(self) -> bool:
        return self.over or self._queue.poll(self)


class CollectiveQueue:
    """First in, first out; the first error ends every work, under way or to come.

    ``reached(number)`` tells whether a collective that yielded ``number`` may go on, and
    ``missing(number)`` for which ranks it waits. Whoever moves the first work holds the lock. A
    caller that waits spins for ``spin_seconds``. With ``spare_cores`` the rank that calls last
    leaves the work to the thread, and goes on computing.
    """

    def __init__(
        self,
        policy: WaitPolicy,
        reached: Callable[[int], bool],
        missing: Callable[[int], Sequence[int]],
    ) -> None:
        self.policy = policy
        self._reached = reached
        self._missing = missing
        self.spin_seconds = SPIN_SECONDS
        self.last: tuple[str, float] | None = None
        self.spare_cores = False
        self._open: deque[QueuedWork] = deque()
        self._moving = threading.Lock()
        # appending and popping are atomic, counting is not
        self._waiters: deque[QueuedWork] = deque()
        self._alarm = Alarm(WAKE_SECONDS)
        self._alarm_set = False
        self._thread: threading.Thread | None = None
        self._closed = False
        _queues.add(self)
        policy.engines.append(weakref.ref(self))

    @property
    def idle(self) -> bool:
        return not self._open

    def under_way(self) -> tuple[str, float] | None:
        try:
            work = self._open[0]
        except IndexError:
            return None
        return work.description, work.started or work.submitted

    def submit(self, description: str, steps: Steps, *, background: bool) -> QueuedWork:
        """Queue ``steps``, and take those that need not wait; a thread takes the rest if
        ``background``.
        """
        if self.policy.error is not None:
            raise self.policy.error
        if self._closed:
            raise CollectiveError(f"{description}: this communicator was closed; build a new one.")
        work = QueuedWork(self, description, steps)
        self._open.append(work)
        started = False
        if self._moving.acquire(False):
            try:
                if not (background and self.spare_cores):
                    while self._open and self._move(self._open[0]):
                        pass
                elif self._open and self._open[0] is work:
                    self._move(work)  # the others learn that this rank is here
            finally:
                self._moving.release()
            started = work.over or work.awaits > 0
        if background or not started:
            self._wake_thread()
        return work

    def finish(self, work: QueuedWork) -> None:
        """Run the queue up to ``work`` in this thread, or wait while another one does."""
        self._waiters.append(work)
        try:
            while not work.over:
                if self._moving.acquire(False) or self._moving.acquire(timeout=CHECK_SECONDS):
                    try:
                        self._run_until(work)
                    finally:
                        self._moving.release()
                else:
                    self._look()
        finally:
            self._waiters.pop()
            if self._open:
                self._wake_thread()

    def poll(self, work: QueuedWork) -> bool:
        """Take the steps that need not wait; whether ``work`` is over."""
        if self._moving.acquire(False):
            try:
                while not work.over and self._move(self._open[0]):
                    pass
            finally:
                self._moving.release()
        return work.over

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        while self._open:
            last = self._open[-1]
            try:
                self.finish(last)
            except RingError:
                break  # whoever waits for the work is told
        # From here on no thread writes into others' memory.
        if self._moving.acquire(timeout=STUCK_SECONDS):
            self._moving.release()
        if self._thread is not None:
            self._alarm.ring()
            self._thread.join(CHECK_SECONDS)

    def _run_until(self, work: QueuedWork) -> None:
        while not work.over:
            head = self._open[0]
            if not self._move(head):
                self._wait(head)

    def _move(self, work: QueuedWork) -> bool:
        """Take one step of the first work if it need not wait; whether it did."""
        if self.policy.error is not None:
            self._end_all(self.policy.error)
            return False
        if work.awaits and not self._reached(work.awaits):
            return False
        assert work.steps is not None
        if not work.started:
            work.started = time.monotonic()
        try:
            # No mode or `torch.func` transform of the code that waits applies here. Clearing an
            # empty stack costs 2 µs.
            transformed = peek_interpreter_stack() is not None
            with (
                torch._C.DisableTorchFunction(),
                temporarily_clear_interpreter_stack() if transformed else _NOTHING,
            ):
                if work.inference:
                    with torch.inference_mode():
                        work.awaits = next(work.steps)
                else:
                    work.awaits = next(work.steps)
        except StopIteration:
            self._open.popleft()
            work.steps = None  # lets go of the tensors
            work.ended = time.perf_counter()
            self.last = work.description, work.started
            work.over = True
        except RingError as error:
            self._end_all(self.policy.fail(error))
        except BaseException as error:
            self._end_all(self.policy.fail(transport_error(work.description, error)))
            if not isinstance(error, Exception):  # Ctrl-C in the thread that waits
                raise
        return True

    def _wait(self, work: QueuedWork) -> None:
        """Until the first work may go on: spin, then yield, then sleep."""
        number, reached = work.awaits, self._reached
        began = time.perf_counter()
        next_check = CHECK_SECONDS
        while not reached(number):
            waited = time.perf_counter() - began
            if waited < self.spin_seconds:
                continue
            if waited < CALLER_YIELD_SECONDS:
                _yield()
                continue
            if waited > next_check:
                next_check = waited + CHECK_SECONDS
                if not self._may_wait_on(work):
                    return
            time.sleep(min(waited * SLEEP_SHARE, LONGEST_SLEEP_SECONDS))

    def _may_wait_on(self, work: QueuedWork) -> bool:
        """Every 20 ms of a wait; False once everything has ended with an error."""
        try:
            self.policy.raise_if_broken()
            self.policy.check_peers()
            seconds = time.monotonic() - work.started
            missing = self._missing(work.awaits)
            work.num_warnings += self.policy.warn_of_stall(
                work.description, seconds, missing, work.num_warnings
            )
            if seconds > self.policy.seconds:
                raise self.policy.timeout_error(work.description, missing)
        except RingError as error:
            self._end_all(self.policy.fail(error))
            return False
        return True

    def _look(self) -> None:
        """Every 20 ms while another thread moves the queue."""
        self.policy.check_peers()
        work = self._open[0] if self._open else None
        waited = time.monotonic() - work.started if work is not None and work.started else 0.0
        if work is not None and waited > self.policy.seconds + STUCK_SECONDS:
            raise self.policy.fail(self.policy.timeout_error(work.description))

    def _end_all(self, error: RingError) -> None:
        while self._open:
            work = self._open.popleft()
            work.steps = None
            work.error = error
            work.over = True

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ring-collectives", daemon=True)
            self._thread.start()
        if not self._alarm_set:  # virtual machines take 20 µs to set a timer anew
            self._alarm_set = True
            self._alarm.set()

    def _run(self) -> None:
        while True:
            self._alarm.wait()
            self._alarm_set = False  # before it looks at the queue
            if self._closed:
                return
            self._run_behind()

    def _run_behind(self) -> None:
        """Run the queue while nobody waits for it.

        The lock is free during a sleep: a caller that waits goes on at once. Spinning would keep
        the interpreter's lock from backward's hooks.
        """
        waiting_since = next_check = 0.0
        while self._open and not self._waiters:
            with self._moving:
                work = self._open[0] if self._open else None
                if work is None:
                    return
                # Its caller may be about to wait.
                if time.monotonic() - work.submitted < WAKE_SECONDS / 2:
                    self._wake_thread()
                    return
                now = time.perf_counter()
                if self._move(work):
                    waiting_since = 0.0
                    continue
                if not waiting_since:
                    waiting_since, next_check = now, CHECK_SECONDS
                waited = now - waiting_since
                if waited > next_check:
                    next_check = waited + CHECK_SECONDS
                    if not self._may_wait_on(work):
                        return
            time.sleep(
                0 if waited < YIELD_SECONDS else min(waited * SLEEP_SHARE, LONGEST_SLEEP_SECONDS)
            )


_queues: weakref.WeakSet[CollectiveQueue] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    # A thread inside torch when the interpreter ends would abort the process.
    for queue in list(_queues):
        queue._closed = True
        queue._moving.acquire(timeout=EXIT_SECONDS)  # and kept


class Alarm:
    """Wakes a thread some time after it was set, by Linux's timerfd.

    A thread woken at once would take the interpreter's lock from the caller, which usually is about
    to do the work itself.
    """

    def __init__(self, seconds: float) -> None:
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock: these calls do not block
        monotonic, close_on_exec = 1, 0o2000000
        self._file = libc.timerfd_create(monotonic, close_on_exec)
        if self._file < 0:
            raise OSError("timerfd_create failed")
        self._set_time = libc.timerfd_settime
        self._set_time.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        # struct itimerspec: interval, value
        self._later = (ctypes.c_long * 4)(0, 0, 0, int(seconds * 1e9))
        self._now = (ctypes.c_long * 4)(0, 0, 0, 1)

    def set(self) -> None:
        self._set_time(self._file, 0, self._later, None)

    def ring(self) -> None:
        self._set_time(self._file, 0, self._now, None)

    def wait(self) -> None:
        os.read(self._file, 8)

    def __del__(self) -> None:
        os.close(self._file)
