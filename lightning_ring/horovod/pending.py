"""What this rank has submitted and not run yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from lightning_ring.horovod.requests import JOIN, Metas, Submission

# bytes at the front of a mask. The minimum over the ranks is 0 where some rank ...
STAYS = 0  # ... has nothing left to do, and shuts down
ALL_LEAVE = 1  # ... does not shut down
NO_NEWS = 2  # ... has names to tell
HEAD = 3

CAPACITY = 4096  # names that have a number
UNNAMED = "noname."  # calls without a name have another one each time


class Numbered(NamedTuple):
    """A collective that all ranks have agreed on, and its number, the same on every rank."""

    number: int
    metas: Metas


class Pending:
    """Requests by name. Callers add them in any thread; `Negotiation` takes them, one thread at a
    time.

    A request that all ranks have run before has a number, its byte in the mask. All ranks give and
    free numbers at the same points, so that numbers need no exchange.
    """

    def __init__(self, rank: int) -> None:
        self.requests: dict[str, Submission] = {}
        self.known: dict[str, Numbered] = {}
        self.fresh = False  # something was added since the last mask was made
        self._rank = rank
        self._names: list[str] = []
        self._free: list[int] = []
        # names whose tensors came in other sizes
        self._changing: set[str] = set()
        self._news: list[Submission] = []
        self._mask = bytearray(HEAD)
        self._lock = threading.Lock()

    def add(self, request: Submission) -> None:
        """Add ``request``.

        Raises:
            ValueError: Its name is pending already.
        """
        with self._lock:
            if request.name in self.requests:
                raise ValueError(
                    f"{request.name}: a collective of this name was submitted and is not done "
                    "yet. Give each a name of its own, or synchronize the first one before "
                    "the second."
                )
            self.requests[request.name] = request
            if request.name == JOIN:  # from here on the mask tells that this rank has joined
                self._tell_by_name(self.requests.values())
            known = None if JOIN in self.requests else self.known.get(request.name)
            if known is not None and known.metas[self._rank] == request.meta:
                request.number = known.number
                self._mask[HEAD + known.number] = 1
            else:
                self._news.append(request)
            self.fresh = True

    def tell(self, *, leaving: bool) -> tuple[bytearray, list[Submission]]:
        """The mask of the next cycle, and the requests that have no number."""
        with self._lock:
            self.fresh = False
            news, self._news = self._news, []
            self._mask[STAYS] = not leaving or bool(self.requests)
            self._mask[ALL_LEAVE] = leaving
            self._mask[NO_NEWS] = not news
            return self._mask[:], news

    def finish(
        self, names: Iterable[str], error: str | None = None, cause: BaseException | None = None
    ) -> None:
        with self._lock:  # first: the caller may submit the name again at once
            done = [self.requests.pop(name) for name in names if name in self.requests]
            for request in done:
                if request.number is not None:
                    self._mask[HEAD + request.number] = 0
        for request in done:
            if error is not None:
                request.fail(error, cause)
            request.done = True

    def agreed(self, number: int) -> tuple[str, Metas]:
        name = self._names[number]
        return name, self.known[name].metas

    def number(self, name: str, metas: Metas) -> None:
        """Give ``name`` a number, if tensors of the same size are expected again."""
        if UNNAMED in name or name in self._changing or len(self.known) >= CAPACITY:
            return
        with self._lock:
            number = self._free.pop() if self._free else len(self._names)
            self._names[number : number + 1] = [name]
            self.known[name] = Numbered(number, metas)
            self._mask += bytes(HEAD + len(self._names) - len(self._mask))

    def forget(self, name: str, *, changed: bool = False) -> None:
        """Free a number."""
        with self._lock:
            self._free.append(self.known.pop(name).number)
            if changed:
                self._changing.add(name)
            if name in self.requests:
                self._tell_by_name([self.requests[name]])

    def tell_old_ones_by_name(self, before: float) -> None:
        """For requests added ``before``: a mask does not tell which ranks lack one."""
        with self._lock:
            self._tell_by_name(one for one in self.requests.values() if one.since < before)

    def _tell_by_name(self, requests: Iterable[Submission]) -> None:
        for request in requests:
            if request.number is not None:
                self._mask[HEAD + request.number] = 0
                request.number = None
                self._news.append(request)
                self.fresh = True
