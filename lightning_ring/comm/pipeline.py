"""The way of a tensor through the three stages of a hierarchical collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lightning_ring.comm.communicator import CompletedWork, Work
from lightning_ring.comm.waiting import CHECK_SECONDS, Patience

Stage = Callable[[], Work]


def nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Passage:
    """The way of one piece of a tensor: within the node, across nodes, and within the node again.

    Each starts a collective, if there is one at that stage; ``arrived`` is called between the last two.
    """

    inward: Stage = CompletedWork
    across: Stage = CompletedWork
    arrived: Callable[[], object] = nothing
    outward: Stage = CompletedWork


class Journey:
    """The `Work` of a tensor that passes through the stages. ``finish`` is run once, by the first `wait`."""

    def __init__(self, patience: Patience, finish: Callable[[], object]) -> None:
        self.agreed: Work = CompletedWork()
        self._patience = patience
        self._finish = finish
        self._finishing = threading.Lock()
        self._outward: Work = CompletedWork()
        self._leaving = threading.Event()

    def is_leaving(self, outward: Work) -> None:
        """``outward`` is the last stage of the last piece; stages run first in, first out."""
        self._outward = outward
        self._leaving.set()

    @property
    def ended(self) -> float | None:
        """As `CollectiveRecord.ended`."""
        return getattr(self._outward, "ended", None) if self._leaving.is_set() else None

    def wait(self) -> None:
        self.agreed.wait()
        while not self._leaving.wait(CHECK_SECONDS):
            self._patience.ask_check()
            if self._patience.error is not None:
                self._patience.raise_named(self._patience.error)
        self._outward.wait()
        with self._finishing:
            self._finish()
            self._finish = nothing

    def done(self) -> bool:
        return self._patience.error is not None or (self._leaving.is_set() and self._outward.done())
