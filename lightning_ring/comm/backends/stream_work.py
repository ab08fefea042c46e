"""Collectives on a GPU's streams: the works that a process group returned, in the order of the
calls.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_ring.comm.waiting import WaitPolicy, poll_until, transport_error


class Launched(NamedTuple):
    """A collective on the streams."""

    description: str
    since: float  # by the monotonic clock
    work: Any  # of torch.distributed


@dataclass(slots=True, eq=False)
class StreamWork:
    """A collective on the GPU's streams. ``finish`` is queued behind it, once, by the first
    `wait`.

    ``held`` refers to the collective's tensors until then. torch's work drops them when the first
    stream is ordered after it, which may be the monitor's: the stream that computes could get their
    memory for other tensors, which the collective still reads.
    """

    _description: str
    _work: Any
    _finish: Callable[[], None] | None
    _held: Any

    def order_current_stream(self) -> None:
        """Have the current stream go on after the collective; unlike `wait` this queues nothing
        behind it.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise transport_error(self._description, error) from error

    def wait(self) -> None:
        self.order_current_stream()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._held = None

    def done(self) -> bool:
        return bool(self._work.is_completed())


class StreamQueue:
    """The collectives of one communicator that the GPU has not ended, as far as the host knows.

    An `Engine`: the stall report shows the names of those that the GPU waits in.
    """

    def __init__(self, policy: WaitPolicy) -> None:
        self._policy = policy
        self._open: deque[Launched] = deque()  # changed by the thread that calls collectives only
        self._last: Launched | None = None
        policy.engines.append(weakref.ref(self))

    def add(self, description: str, work: Any, finish: Callable[[], None], held: Any) -> StreamWork:
        while self._open and self._open[0].work.is_completed():
            self._last = self._open.popleft()
        self._open.append(Launched(description, time.monotonic(), work))
        return StreamWork(description, work, finish, held)

    def head(self) -> Launched | None:
        """The first one that has not ended. From any thread."""
        return next(
            (launched for launched in tuple(self._open) if not launched.work.is_completed()), None
        )

    def under_way(self) -> tuple[str, float] | None:
        head = self.head()
        return head[:2] if head is not None else None

    @property
    def last(self) -> tuple[str, float] | None:
        last = self._last
        for launched in tuple(self._open):
            if not launched.work.is_completed():
                break
            last = launched
        return last[:2] if last is not None else None

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Block until ``reached()``, which is behind these collectives, as long as the policy
        allows.

        Raises:
            PeerFailedError: Another rank failed meanwhile.
            CollectiveError: A collective did not end within the timeout. Time is counted from when
                it was seen to be the first one open: before that the GPU had other things to do.
        """
        policy, known, since, num_warnings = self._policy, None, 0.0, 0

        def check() -> None:
            nonlocal known, since, num_warnings
            policy.raise_if_broken()
            policy.check_peers()
            head = self.head()
            if head is not known:
                known, since, num_warnings = head, time.monotonic(), 0
            if head is None:  # the GPU computes
                return
            seconds = time.monotonic() - since
            num_warnings += policy.warn_of_stall(head.description, seconds, (), num_warnings)
            if seconds > policy.seconds:
                raise policy.fail(policy.timeout_error(head.description))

        poll_until(reached, check)
        # An aborted collective ends too, and leaves no result.
        policy.raise_if_broken()

    def ends_within(self, seconds: float) -> bool:
        """Wait until all collectives have ended, for ``seconds`` at most; whether they did."""
        until = time.monotonic() + seconds
        poll_until(lambda: self.under_way() is None or time.monotonic() > until, lambda: None)
        return self.under_way() is None
