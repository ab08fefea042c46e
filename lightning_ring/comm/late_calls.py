"""Agreement of two ranks on their calls without a message: they are compared once one is late.

The tag of a message is a digest of its call, so that only messages of the same call meet. Ranks
that called different collectives both wait, and each tells the other one what it waits in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from lightning_ring.comm.calls import disagreement
from lightning_ring.comm.waiting import WaitPolicy

_FIRST_TAG, _NUM_TAGS = 2**29, 2**29  # Gloo's are 31 bits


class LateCalls:
    """Calls of one communicator that are under way on this ``rank``, 0 or 1.

    ``tell(number, description)`` sends a call of this rank to `hear` of the other one, by other
    means than the communicator, and returns at once. The first difference breaks the communicator
    of ``policy`` with the same error on both ranks.
    """

    def __init__(self, rank: int, policy: WaitPolicy, tell: Callable[[int, str], object]) -> None:
        self._rank = rank
        self._policy = policy
        self._tell = tell
        self._under_way: dict[int, str] = {}
        self._newest = 0
        self._heard: dict[int, str] = {}  # of the other rank's, that this rank has not called

    def tag(self, number: int, description: str) -> int:
        """The tag of the messages of a call."""
        return _FIRST_TAG + zlib.crc32(f"{number} {description}".encode()) % _NUM_TAGS

    def begin(self, number: int, description: str) -> None:
        """This rank makes its call ``number``."""
        self._under_way[number] = description
        self._newest = number  # before it looks: `hear` looks after it has written
        if (theirs := self._heard.pop(number, None)) is not None:
            self._compare(number, description, theirs)

    def end(self, number: int) -> None:
        """The call is over: the other rank has made the same one."""
        self._under_way.pop(number, None)

    def tell(self, number: int) -> None:
        """The call is late."""
        if (description := self._under_way.get(number)) is not None:
            self._tell(number, description)

    def hear(self, number: int, theirs: str) -> None:
        """The other rank waits in its call ``number``. From any thread."""
        self._heard[number] = theirs
        if number <= self._newest:
            self._heard.pop(number, None)
            if (own := self._under_way.get(number)) is not None:
                self._compare(number, own, theirs)

    def _compare(self, number: int, own: str, theirs: str) -> None:
        if own != theirs and self._policy.error is None:
            texts = [own, theirs] if self._rank == 0 else [theirs, own]
            self._policy.fail(disagreement(number, texts))
            self.tell(number)  # the other rank may not be late yet
