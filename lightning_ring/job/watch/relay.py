"""The server of the job watch: a thread of rank 0 that passes on messages and reports
connections that ended.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.door import Door, knock
from lightning_ring.job.rendezvous.greeting import LOOPBACK, listen
from lightning_ring.job.watch.messages import Message, MessageConnection

_DOOR = "watch"
_CONNECT_SECONDS = 30.0
_SENDER = ("rank", "host", "pid")  # what the relay adds to every message
_TOLD = 2  # so that the first one to fail hears of another one as well


def join_relay(
    info: RankInfo, store: Store, secret: str
) -> tuple[Relay | None, MessageConnection, Message]:
    """Start the relay in rank 0 and connect this rank to it. Collective.

    Returns the relay (in rank 0), this rank's connection, and rank 0's ``host`` and ``pid``.
    """
    # On one node MASTER_ADDR may name any of its interfaces.
    address = LOOPBACK if info.num_nodes == 1 else host_of(store) or LOOPBACK
    store = PrefixStore("lightning_ring/watch", store)
    home = {"host": os.uname().nodename, "pid": os.getpid()}
    relay: Relay | None = None
    if info.rank == 0:
        listener = listen(LOOPBACK if info.num_nodes == 1 else "")
        relay = Relay(listener, secret, home, info.world_size)
        store.set("relay", str(relay.door.port))
    try:
        port, hello = int(store.get("relay")), {"rank": info.rank} | home
        connection, rank_0 = knock(
            [address],
            port,
            secret,
            _DOOR,
            hello,
            _CONNECT_SECONDS,
            answer_seconds=_CONNECT_SECONDS,  # rank 0 may be in C code, or load libraries
        )
    except (OSError, RuntimeError) as error:
        advice = (
            "The launcher says that all ranks run on one node, and this one runs on "
            f"{home['host']}: if there are several, set LOCAL_WORLD_SIZE to the number of ranks on "
            "each."
            if info.num_nodes == 1
            else "Otherwise open the hosts' firewalls to each other: ranks talk over ports that "
            "the system chooses."
        )
        raise RankDiscoveryError(
            f"Rank {info.rank} could not reach the job watch in rank 0, on {address}: "
            f"{str(error).splitlines()[0]}. Rank 0 may have failed to start. {advice}"
        ) from error
    return relay, connection, rank_0


def host_of(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""


class Relay:
    """Passes messages of one rank on to all of ``world_size``, its sender included. ``home`` is
    rank 0's ``host`` and ``pid``.

    A message with a rank under ``"to"`` goes to that one only, and its sender is told. When a
    connection ends, all get ``gone`` after a ``failed`` or ``left`` message, else ``dead``. All
    ranks get the messages in one order. A rank that connects late gets the earlier failures. Once
    every rank has left or gone, all are told. Rank 0 hears everything, the others only the first
    `_TOLD` of each kind: thousands of ranks may fail of one death.
    """

    def __init__(
        self, listener: socket.socket, secret: str, home: Message, world_size: int
    ) -> None:
        self._home = home
        self._world_size = world_size
        self._away: set[int] = set()
        self._senders: dict[int, Message] = {}  # of the ranks that are connected
        self._excused: set[int] = set()
        self._history: list[Message] = []  # that all ranks know
        self.door = Door(listener, secret, _DOOR, self, world_size)
        self.door.serve_in_thread("ring-watch-relay")

    def hellos(self) -> dict[int, Message]:
        """``host`` and ``pid`` of the connected ranks, from any thread."""
        senders = dict(self._senders)
        return {rank: sender for rank, sender in senders.items() if rank not in self._away}

    # -- called by the door

    def admit(self, hello: Message) -> tuple[int, Message]:
        rank: int = hello["rank"]
        if (known := self._senders.get(rank)) is not None:
            raise PermissionError(f"rank {rank} is process {known['pid']} on {known['host']}")
        return rank, self._home

    def take(self, rank: int, message: Message) -> None:
        if message["kind"] == "hello":
            self._senders[rank] = {name: message[name] for name in _SENDER}
            for earlier in self._history:
                self.door.send(earlier, rank)
            return
        if message["kind"] in ("failed", "left"):
            self._excused.add(rank)
        elif message["kind"] == "fit":  # its error was caught
            self._excused.discard(rank)
        self._pass_on(message | self._senders[rank])
        if message["kind"] == "left":
            self._is_away(rank)

    def hung_up(self, rank: int, why: str) -> None:
        kind = "gone" if rank in self._excused else "dead"
        self._pass_on({"kind": kind, "text": why} | self._senders.pop(rank))
        self._is_away(rank)

    def _is_away(self, rank: int) -> None:
        before = len(self._away)
        self._away.add(rank)
        if before < len(self._away) == self._world_size:
            self.door.send({"kind": "all left", "rank": None}, *self._senders)

    def _pass_on(self, message: Message) -> None:
        if isinstance(to := message.get("to"), int):
            self.door.send(message, to)
            if to != message["rank"]:  # its sender counts what was passed on
                self.door.send({"kind": "passed on", "rank": message["rank"]}, message["rank"])
        elif self._is_for_all(message):
            self.door.send(message, *self._senders)
        else:
            self.door.send(message, *{0, message["rank"]})

    def _is_for_all(self, message: Message) -> bool:
        kind = message["kind"]
        if kind == "gone":
            return any(one["rank"] == message["rank"] for one in self._history)
        if kind not in ("failed", "dead", "left"):
            return True
        told = [one for one in self._history if _sort(one) == _sort(message)]
        if len(told) >= _TOLD:
            return False
        if kind == "failed":  # failures of earlier fits were caught
            fit = message.get("fit", 0)
            self._history = [one for one in self._history if one.get("fit", fit) >= fit]
        self._history.append(message)
        return True


def _sort(event: Message) -> tuple[str, bool, int]:
    failed = event["kind"] == "failed"
    return event["kind"], failed and event.get("echo", False), event.get("fit", 0) if failed else 0
