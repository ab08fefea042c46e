"""A job of ranks that cannot be replaced: store, greeter, relay of the watch, stall reports.

Each rank opens what `lightning_ring.job` opens, except process groups of torch.distributed.
"""

import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from benchmarks.scale.processes import Reader, decode_members_once, footprint, on_all
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import PeerFailedError
from lightning_ring.job.members import exchange_members, own_member
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.store import agree_on_secret, open_store
from lightning_ring.job.stalls import StallReporter
from lightning_ring.job.watch.messages import Message
from lightning_ring.job.watch.relay import join_relay
from lightning_ring.job.watch.watch import JobWatch

TIMEOUT, WARNING = timedelta(seconds=300), timedelta(seconds=30)
PER_NODE = 8
AT_ONCE = 8  # threads
COLLECTIVE = "all_reduce of bucket 3"


class _InBucket:
    """Stands for an engine whose rank has waited in a collective for long."""

    last = None

    def under_way(self) -> tuple[str, float]:
        return COLLECTIVE, time.monotonic() - WARNING.total_seconds() - 1


class Watch(JobWatch):
    """Read by the `Reader` of its process; rank 0's has the thread of any watch."""

    def __init__(self, info: RankInfo, store: Store, secret: str, reader: Reader) -> None:
        self._reader = reader
        super().__init__(info, store, secret)

    def _open(self, store: Store, secret: str) -> None:
        if self.info.rank == 0:
            super()._open(store, secret)
            return
        _, self._connection, self.rank_0 = join_relay(self.info, store, secret)
        connection = self._connection
        self._reader.add(connection.socket, lambda: self._receive(connection))

    def close(self) -> None:
        if self.info.rank == 0:
            super().close()
        elif self._connection is not None:
            self._connection.socket.shutdown(socket.SHUT_RDWR)


class Stalls(StallReporter):
    """Handles its events in threads that all ranks of a process share."""

    def __init__(self, watch: JobWatch, pool: ThreadPoolExecutor) -> None:
        super().__init__(watch)
        self._pool = pool
        self._events = self if watch.info.rank else self._events

    def put(self, event: Message) -> None:
        self._pool.submit(self._handle, event)

    def _run(self) -> None:
        if self._rank == 0:
            super()._run()


class JobRanks:
    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        self.ranks = ranks
        self._world_size = world_size
        self._watches: dict[int, JobWatch] = {}
        self._stalls: dict[int, StallReporter] = {}
        self._engine = _InBucket()
        self._stores: list[Store] = []
        self._own_stores: dict[int, Store] = {}
        self._deaths: list[float] = []
        self._before = footprint()
        decode_members_once()

    def start(self) -> float:
        self._reader, self._pool = Reader(), ThreadPoolExecutor(AT_ONCE)
        on_all(self, self._start, AT_ONCE)
        on_all(self, self._exchange)
        return time.monotonic()

    def _start(self, rank: int) -> None:
        nodes, size = max(1, self._world_size // PER_NODE), min(PER_NODE, self._world_size)
        place = rank % size, size, rank // size, nodes
        info = RankInfo(rank, self._world_size, *place, "torchrun")
        store = open_store(info, TIMEOUT)
        self._stores.append(store)  # the last reference ends the server
        store = PrefixStore(f"generation {info.generation}", store)
        watch = Watch(info, store, agree_on_secret(info, store), self._reader)
        watch.on_event(self._hear)
        self._watches[rank], self._stalls[rank] = watch, Stalls(watch, self._pool)
        self._own_stores[rank] = store

    def _exchange(self, rank: int) -> None:
        watch = self._watches[rank]
        own = own_member(watch.info, rank, torch.device("cpu"))
        members = exchange_members(own, watch.info, self._own_stores[rank])
        assert len(members) == self._world_size

    def _hear(self, message: Message) -> None:
        if message["kind"] == "dead":
            self._deaths.append(time.monotonic())

    def stall(self, away: int) -> float:
        """All ranks but ``away`` notice that a collective is late. In rank 0's process: when it
        has said so.
        """
        said: list[float] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(time.monotonic())  # type: ignore[method-assign]
        logging.getLogger("lightning_ring").addHandler(handler)
        for rank, stalls in self._stalls.items():
            policy = WaitPolicy(TIMEOUT, lambda: None, WARNING)
            if rank != away:
                policy.engines.append(lambda: self._engine)
            stalls.follow(policy, 1)
        for rank, stalls in self._stalls.items():
            if rank != away:
                stalls.notice(COLLECTIVE, WARNING.total_seconds())
        while 0 in self.ranks and not said:
            time.sleep(0.01)
        return time.monotonic()

    def fit(self) -> float:
        on_all(self, lambda rank: self._watches[rank].reset())
        return time.monotonic()

    def deaths(self) -> list[float]:
        """When each rank heard of a death, once all have."""
        while len(self._deaths) < len(self.ranks):
            time.sleep(0.01)
        return self._deaths

    def fail(self) -> float:
        """Every rank ends, as it does after a death."""
        error = PeerFailedError("another rank died")
        on_all(self, lambda rank: self._watches[rank].report(error))
        return time.monotonic()

    def leave(self) -> float:
        on_all(self, lambda rank: self._watches[rank].leave_early())
        return time.monotonic()

    def facts(self) -> dict[str, float]:
        now = footprint()
        return {name: value - self._before[name] for name, value in now.items()}
