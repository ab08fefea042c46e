"""Turns of reducers that share a communicator: one backward through several modules sends in one order."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded


class Turn(Protocol):
    """What `Turns` needs of a reducer."""

    @property
    def under_way(self) -> bool:
        """Whether its backward has begun and is not finished."""

    @property
    def has_sent(self) -> bool:
        """Whether all of its buckets were sent."""

    def finish(self) -> None: ...


class Turns:
    """Reducers send one after the other, in the order in which a backward reached their modules.

    Else the first one's last bucket, which waits for a parameter that only some ranks use, would be sent before the
    second one's on some ranks, and after it on others.
    """

    def __init__(self) -> None:
        self._begun: list[Turn] = []

    def begin(self, reducer: Turn) -> None:
        self._begun = [other for other in self._begun if other.under_way and other is not reducer] + [reducer]

    def is_first(self, reducer: Turn) -> bool:
        return not self._before(reducer)

    def may_send(self, reducer: Turn) -> bool:
        return all(other.has_sent for other in self._before(reducer))

    def finish_before(self, reducer: Turn) -> None:
        for other in self._before(reducer):
            other.finish()

    def _before(self, reducer: Turn) -> list[Turn]:
        if self._begun[:1] == [reducer] or reducer not in self._begun:
            return []
        return [other for other in self._begun[: self._begun.index(reducer)] if other.under_way]


_turns: WeakKeyDictionary[Communicator, Turns] = WeakKeyDictionary()


def turns_of(comm: Communicator) -> Turns:
    """Those of all reducers over ``comm``, however it is recorded."""
    return _turns.setdefault(unrecorded(comm), Turns())
