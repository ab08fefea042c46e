"""Pieces of a tensor on their way through the three stages of a hierarchical collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lightning_ring.comm.communicator import CompletedWork, Work
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy

Stage = Callable[[], Work]


def nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class PieceStages:
    """The stages of one piece: within the node, across nodes, and within the node again.

    Each function starts a collective; ``after_across`` is called between the last two.
    """

    intra_first: Stage = CompletedWork
    across: Stage = CompletedWork
    after_across: Callable[[], object] = nothing
    intra_last: Stage = CompletedWork


class PipelinedWork:
    """The `Work` of a tensor whose pieces pass through the stages. ``finish`` is run once, by the first `wait`.

    Attributes:
        agreed: Ends once the ranks have agreed on the call.
    """

    def __init__(self, policy: WaitPolicy, finish: Callable[[], object]) -> None:
        self.agreed: Work = CompletedWork()
        self._policy = policy
        self._finish = finish
        self._finishing = threading.Lock()
        self._last: Work = CompletedWork()
        self._last_started = threading.Event()

    def set_last(self, last: Work) -> None:
        """``last`` is the last stage of the last piece; stages run first in, first out."""
        self._last = last
        self._last_started.set()

    @property
    def ended(self) -> float | None:
        """As `CollectiveRecord.ended`."""
        return getattr(self._last, "ended", None) if self._last_started.is_set() else None

    def wait(self) -> None:
        self.agreed.wait()
        while not self._last_started.wait(CHECK_SECONDS):
            self._policy.check_peers()
            if self._policy.error is not None:
                self._policy.raise_named(self._policy.error)
        self._last.wait()
        with self._finishing:
            self._finish()
            self._finish = nothing

    def done(self) -> bool:
        return self._policy.error is not None or (self._last_started.is_set() and self._last.done())
