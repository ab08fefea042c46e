"""Ranks may submit named collectives in different orders: a thread in each rank agrees with the others on one order.

A *cycle* is one exchange of what each rank has submitted since the last one. A rank takes part while it has a request
that is not done; a rank without one holds the others up only where they wait for it anyway. What was exchanged once has
a number, so that a steady step exchanges a few integers.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.horovod.errors import HorovodInternalError
from lightning_ring.horovod.execution import Agreed, run
from lightning_ring.horovod.requests import Meta, Request, problem_of
from lightning_ring.horovod.timeline import Timeline

CYCLE_SECONDS = 0.001
STALL_SECONDS = 60.0
_MOST_KNOWN = 8192  # calls without a name have another one each time
JOIN = "join"
_SHUTDOWN = "the Horovod API was shut down on some rank, or a rank has ended. Pending collectives end with this error."

log = logging.getLogger("lightning_ring")


class Negotiation:
    """Of the ranks of one process set, over ``comm``, which belongs to it. Collectives run in its thread."""

    def __init__(self, comm: Communicator, ranks: list[int]) -> None:
        self.comm = comm
        self.ranks = ranks  # of the job, by rank of the set
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._open: dict[str, Request] = {}  # this rank's, until they are done
        self._table: dict[str, dict[int, Meta]] = {}  # submitted by some rank, in the order of arrival
        self._since: dict[str, float] = {}
        self._numbers: dict[tuple[str, Meta], int] = {}
        self._known: list[tuple[str, Meta]] = []
        self._joined: dict[int, None] = {}  # in the order of joining
        self._leaving = False
        self._awaited = False  # the caller waits for what it has submitted
        self._ended: str | None = None
        self._cause: BaseException | None = None
        self.timeline: Timeline | None = None  # set by `start_timeline`
        self._thread = threading.Thread(target=self._loop, name="ring-horovod", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request]) -> None:
        """Have ``requests`` run once every rank has submitted them.

        Raises:
            ValueError: A request of that name is not done yet.
            HorovodInternalError: The job is over.
        """
        with self._changed:
            if self._ended is not None or self._leaving:
                raise HorovodInternalError(self._ended or _SHUTDOWN) from self._cause
            names = [request.name for request in requests]
            if twice := [name for index, name in enumerate(names) if name in self._open or name in names[:index]]:
                raise ValueError(
                    f"{twice[0]}: a collective of this name was submitted and is not done yet. Give each a name of its "
                    "own, or synchronize the first one before the second."
                )
            self._open.update(zip(names, requests, strict=True))
            self._new += requests
            self._changed.notify_all()

    def hurry(self) -> None:
        """The caller waits: exchange what was submitted at once."""
        with self._changed:
            self._awaited = True
            self._changed.notify_all()

    def close(self) -> None:
        """End on all ranks. Collective: a rank that has more to do gets an error there."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        self._thread.join()
        self.comm.close()

    # -- in the thread

    def _loop(self) -> None:
        try:
            while self._cycle():
                pass
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}", error)

    def _cycle(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._open or self._leaving)
            if self._new:  # more may follow, and one exchange for all is cheaper
                self._changed.wait_for(lambda: self._awaited or self._leaving, CYCLE_SECONDS)
            self._awaited = False
            new, self._new = self._new, []
            leaving = self._leaving and not self._open
        mine = [self._numbers.get((one.name, one.meta), (one.name, one.meta)) for one in new]
        if (timeline := self.timeline) is not None:
            timeline.cycle()
        told: list[tuple[bool, list[Any]]] = self.comm.all_gather_object((leaving, mine))
        if any(left for left, _ in told):
            self._end(_SHUTDOWN)
            return False
        for rank, (_, entries) in enumerate(told):
            for entry in entries:
                self._take(rank, self._known[entry] if isinstance(entry, int) else entry)
        ready = self._ready()
        if ready:
            self._run(ready)
        elif not any(entries for _, entries in told):
            self._warn_of_stalls()
            time.sleep(CYCLE_SECONDS)
        return True

    def _take(self, rank: int, entry: tuple[str, Meta]) -> None:
        name, meta = entry
        if entry not in self._numbers and len(self._known) < _MOST_KNOWN:  # on all ranks in one order
            self._numbers[entry] = len(self._known)
            self._known.append(entry)
        if meta.kind == JOIN:
            self._joined[rank] = None
            return
        self._table.setdefault(name, {})[rank] = meta
        self._since.setdefault(name, time.monotonic())

    def _ready(self) -> list[Agreed]:
        """What every rank has submitted, or has joined; grouped collectives when the whole group is there."""
        world_size = self.comm.world_size
        absent = set(self._joined)
        complete = [name for name, metas in self._table.items() if len(metas.keys() | absent) == world_size]
        counts: dict[tuple[str, int], int] = {}
        for name in complete:
            group = self._table[name][min(self._table[name])].group
            counts[group] = counts.get(group, 0) + 1
        found = []
        for name in complete:
            metas = self._table[name]
            group = metas[min(metas)].group
            if group[0] and counts[group] < group[1]:
                continue
            if self.timeline is not None:
                self.timeline.negotiated(name, metas[min(metas)].kind, self._since[name])
            del self._table[name], self._since[name]
            found.append(Agreed(name, metas, self._open.get(name) if self.comm.rank in metas else None))
        return found + self._all_joined()

    def _all_joined(self) -> list[Agreed]:
        if len(self._joined) < self.comm.world_size or self._table:
            return []
        last, self._joined = next(reversed(self._joined)), {}
        own = self._open[JOIN]
        own.result = self.ranks[last]
        return [Agreed(JOIN, {self.comm.rank: own.meta}, own)]

    def _run(self, ready: list[Agreed]) -> None:
        good = []
        for one in ready:
            problem = None
            if one.meta.kind != JOIN:
                problem = problem_of(one.name, one.metas, [self.ranks[rank] for rank in self._joined])
                if problem is None:
                    good.append(one)
                    continue
            if one.own is not None:
                one.own.error = problem
            self._finished(one)
        began = time.monotonic()
        run(good, self.comm, self._finished)
        if (timeline := self.timeline) is not None:
            for kind in {one.meta.kind for one in good}:
                names = [one.name for one in good if one.meta.kind == kind]
                timeline.ran(names, kind, time.monotonic() - began)

    def _finished(self, one: Agreed) -> None:
        if one.own is not None:
            with self._changed:  # first: the caller may submit the name again at once
                self._open.pop(one.name, None)
            one.own.done.set()

    def _end(self, why: str, cause: BaseException | None = None) -> None:
        with self._changed:
            self._ended, self._cause = why, cause
            pending, self._open, self._new = list(self._open.values()), {}, []
        for request in pending:
            request.error, request.cause = why, cause
            request.done.set()

    def _warn_of_stalls(self) -> None:
        now = time.monotonic()
        late = [name for name, since in self._since.items() if now - since > STALL_SECONDS]
        for name in late:
            self._since[name] = now
            if self.comm.rank == 0:
                missing = [self.ranks[rank] for rank in range(self.comm.world_size) if rank not in self._table[name]]
                log.warning(
                    "%s was not submitted by rank(s) %s for %.0f s, while others wait for it.",
                    name,
                    ", ".join(map(str, missing)),
                    STALL_SECONDS,
                )
