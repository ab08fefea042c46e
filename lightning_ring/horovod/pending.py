"""What this rank has submitted and not run yet, and how the other ranks are told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from lightning_ring.horovod.cache import Cache
from lightning_ring.horovod.requests import JOIN, Metas, Submission

# bytes at the front of a mask. The minimum over the ranks is 0 where some rank ...
STAYS = 0  # ... has nothing left to do, and shuts down
ALL_LEAVE = 1  # ... does not shut down
NO_NEWS = 2  # ... has names to tell
HEAD = 3


class Pending:
    """Requests by name. Callers add them in any thread; the cycles of `Negotiation` take them, in
    one at a time.

    A request is told by number, in a mask of a byte for each entry of the cache, if it is one that
    all ranks have run before, and else by name.
    """

    def __init__(self, rank: int) -> None:
        self.cache = Cache(rank)  # changed under the lock only
        self.requests: dict[str, Submission] = {}
        self.fresh = False  # something was added since the last mask was made
        self._news: list[Submission] = []  # to tell by name
        self._mask = bytearray(HEAD)
        self._lock = threading.Lock()  # held for moments

    def add(self, requests: Sequence[Submission]) -> None:
        """Take ``requests``, all or none.

        Raises:
            ValueError: One of that name is here already.
        """
        with self._lock:
            for index, request in enumerate(requests):
                if request.name in self.requests:
                    for before in requests[:index]:
                        del self.requests[before.name]
                    raise ValueError(
                        f"{request.name}: a collective of this name was submitted and is not done "
                        "yet. Give each a name of its own, or synchronize the first one before "
                        "the second."
                    )
                self.requests[request.name] = request
            if requests[0].name == JOIN:  # from here on the mask tells that this rank has joined
                self._tell_by_name(self.requests.values())
            by_name = JOIN in self.requests
            for request in requests:
                request.number = None if by_name else self.cache.number(request.name, request.meta)
                if request.number is None:
                    self._news.append(request)
                else:
                    self._mask[HEAD + request.number] = 1
            self.fresh = True

    def tell(self, *, leaving: bool) -> tuple[bytearray, list[Submission]]:
        """The mask of the next cycle, and the requests that it tells by name."""
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
        """The requests of ``names`` are done."""
        with self._lock:  # first: the caller may submit the name again at once
            done = [
                request for name in names if (request := self.requests.pop(name, None)) is not None
            ]
            for request in done:
                if request.number is not None:
                    self._mask[HEAD + request.number] = 0
        for request in done:
            request.error, request.cause = error, cause
            if error is not None and request.on_error is not None:
                request.on_error(error, cause)
            request.done = True

    def finish_all(self, error: str, cause: BaseException | None) -> None:
        with self._lock:
            names = list(self.requests)
        self.finish(names, error, cause)

    def number(self, name: str, metas: Metas) -> None:
        """From the next mask on ``name`` is told by number. The cache has room for it."""
        with self._lock:
            self.cache.add(name, metas)
            self._mask += bytes(HEAD + self.cache.size - len(self._mask))

    def forget(self, name: str, *, changed: bool = False) -> None:
        """Drop an entry of the cache; what was told by its number is told by name."""
        with self._lock:
            dropped = self.cache.drop(name, changed=changed)
            self._tell_by_name(self.requests[one] for one in dropped if one in self.requests)

    def tell_old_ones_by_name(self, before: float) -> None:
        """Of requests that were added ``before``: a mask does not tell which ranks lack one."""
        with self._lock:
            self._tell_by_name(one for one in self.requests.values() if one.since < before)

    def _tell_by_name(self, requests: Iterable[Submission]) -> None:
        for request in requests:
            if request.number is not None:
                self._mask[HEAD + request.number] = 0
                request.number = None
                self._news.append(request)
                self.fresh = True
