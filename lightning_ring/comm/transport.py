"""Messages between two ranks: what the ring asks of MPI, Gloo and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_ring.comm.waiting import WaitPolicy


class Request(Protocol):
    """A message under way; ``peer`` is the rank at its other end."""

    @property
    def peer(self) -> int: ...


class PointToPoint(Protocol):
    """Send and receive between fixed ranks: all that the ring asks of a transport.

    Messages of one ``tag`` between two ranks arrive in the order they were sent. Tensors are
    contiguous and not empty; a sent one may not change, and a received one may not be read, before
    `wait`. `isend` and `irecv` may be called while another thread waits.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request: ...

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Request:
        """Receive exactly ``tensor.nbytes`` bytes."""

    def wait(self, requests: Sequence[Any]) -> None:
        """Block until all these requests of this transport are over, or raise what interrupts
        the wait.
        """


class Transport(PointToPoint, Protocol):
    """A `PointToPoint` whose waits can be ended from outside."""

    while_waiting: Callable[[Sequence[int]], float]
    """Called with the ranks waited for, again and again during a wait, which goes on for as many
    more seconds as it returns; what it raises ends the wait."""

    def interrupt(self) -> None:
        """End the waits of other threads that ask `while_waiting` too seldom; no message travels
        after that.
        """

    def duplicate(self, policy: WaitPolicy) -> Transport:
        """Another one between the same ranks, whose messages do not meet those of this one.
        Collective.
        """

    def close(self, broken: bool) -> None: ...
