"""Turns of reducers that share a communicator: one backward through several modules sends in one
order.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

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

    Else the first one's last bucket, which waits for a parameter that only some ranks use, would be
    sent before the second one's on some ranks, and after it on others.
    """

    def __init__(self) -> None:
        # a reducer holds the communicator, and these turns live as long as that: they must not hold
        # the reducer
        self._begun: list[ReferenceType[Turn]] = []

    def begin(self, reducer: Turn) -> None:
        others = [other for other in self._living() if other.under_way and other is not reducer]
        self._begun = [ref(each) for each in (*others, reducer)]

    def is_first(self, reducer: Turn) -> bool:
        return not self._before(reducer)

    def may_send(self, reducer: Turn) -> bool:
        return all(other.has_sent for other in self._before(reducer))

    def finish_before(self, reducer: Turn) -> None:
        for other in self._before(reducer):
            other.finish()

    def _before(self, reducer: Turn) -> list[Turn]:
        begun = self._living()
        if begun[:1] == [reducer] or reducer not in begun:
            return []
        return [other for other in begun[: begun.index(reducer)] if other.under_way]

    def _living(self) -> list[Turn]:
        return [reducer for each in self._begun if (reducer := each()) is not None]


_turns: WeakKeyDictionary[Communicator, Turns] = WeakKeyDictionary()


def turns_of(comm: Communicator) -> Turns:
    """Those of all reducers over ``comm``, however it is recorded."""
    return _turns.setdefault(unrecorded(comm), Turns())
