"""The server of the job watch: a thread of rank 0 that passes on messages and reports
connections that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.greeting import LOOPBACK, listen, listening_address
from lightning_ring.job.watch.messages import Message, MessageConnection, in_forked_children

_SENDER = ("rank", "host", "pid")  # what the relay adds to every message


def join_relay(info: RankInfo, store: Store) -> tuple[Relay | None, MessageConnection, Message]:
    """Start the relay in rank 0, which publishes its address in ``store``, and connect this rank to
    it. Collective.

    Returns the relay (in rank 0), this rank's connection, and rank 0's ``host`` and ``pid``.
    """
    # on one node MASTER_ADDR may name any of its interfaces
    address = LOOPBACK if info.num_nodes == 1 else host_of(store)
    store = PrefixStore("lightning_ring/watch", store)
    home = {"host": os.uname().nodename, "pid": os.getpid()}
    relay: Relay | None = None
    if info.rank == 0:
        listener = listen(listening_address(info.num_nodes))
        token = secrets.token_hex(16)
        relay = Relay(listener, token)
        relay.start()
        store.set("relay", json.dumps([listener.getsockname()[1], token, home]))
    try:
        port, token, rank_0 = json.loads(store.get("relay"))
        connection = MessageConnection(socket.create_connection((address, port), timeout=30))
    except (OSError, RuntimeError) as error:  # RuntimeError: the store's timeout
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
    connection.send({"kind": "hello", "token": token, "rank": info.rank} | home)
    return relay, connection, rank_0


def host_of(store: Store) -> str:
    """The host of rank 0, by the name or address under which this rank reached it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else LOOPBACK


class Relay:
    """Accepts the ranks that know ``token`` on ``listener`` and sends every message of one to all,
    its sender included.

    A message with a rank under ``"to"`` goes to that one and to its sender only. A connection that
    ends without a ``failed`` or ``left`` message of its rank becomes a ``dead`` message; otherwise
    a ``gone`` one. All ranks get all messages in the same order. A rank that connects late gets the
    earlier failures.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[MessageConnection, Message] = {}  # its hello message, empty before that
        self._excused: set[int] = set()  # ranks that sent failed or left
        self._history: list[Message] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ring-watch-relay", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        in_forked_children(self._close_sockets)
        self._thread.start()

    def hellos(self) -> dict[int, Message]:
        """``host`` and ``pid`` of the ranks that are connected, from any thread."""
        return {hello["rank"]: hello for hello in list(self._ranks.values()) if hello}

    def close(self) -> None:
        """End the thread. Earlier messages have been handed to the kernel."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=2)

    def _close_sockets(self) -> None:
        """A forked child (a data-loader worker) must not hold the connections open when its
        parent is killed.
        """
        with contextlib.suppress(OSError):
            self._listener.close()
            for connection in self._ranks:
                connection.close()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            for connection in list(self._ranks):
                self._flush(connection)
        self._close_sockets()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            connection = MessageConnection(accepted)
            self._ranks[connection] = {}
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: MessageConnection) -> None:
        messages, over = connection.receive()
        for message in messages:
            if not self._ranks[connection]:
                over = over or self._welcome(connection, message)
                continue
            message |= {name: self._ranks[connection][name] for name in _SENDER}
            if message["kind"] in ("failed", "left"):
                self._excused.add(message["rank"])
            elif message["kind"] == "fit":  # its error was caught, and a new fit begins
                self._excused.discard(message["rank"])
            self._broadcast(message)
        if over is not None:
            self._drop(connection, over)

    def _welcome(self, connection: MessageConnection, hello: Message) -> str | None:
        if hello["kind"] != "hello" or hello.get("token") != self._token:
            return "not a rank of this job"
        self._ranks[connection] = hello
        for message in self._history:
            connection.send(message)
        return None

    def _drop(self, connection: MessageConnection, why: str) -> None:
        self._selector.unregister(connection.socket)
        hello = self._ranks.pop(connection)
        connection.close()
        if hello:
            kind = "gone" if hello["rank"] in self._excused else "dead"
            self._broadcast({"kind": kind, "text": why} | {name: hello[name] for name in _SENDER})

    def _broadcast(self, message: Message) -> None:
        if message["kind"] in ("failed", "left", "dead"):
            self._history.append(message)
        for connection, hello in self._ranks.items():
            one_of_two = hello.get("rank") in (message.get("to"), message["rank"])
            if hello and ("to" not in message or one_of_two):
                connection.send(message)

    def _flush(self, connection: MessageConnection) -> None:
        connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)
