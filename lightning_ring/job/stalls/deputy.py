"""Who speaks when rank 0 is silent, and the relay of the job watch and torch's store with it: rank 1."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable

from torch.distributed import PrefixStore, Store

from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.greeting import listen
from lightning_ring.job.watch.messages import Message, parse

CALL_SECONDS = 1.0
_LONGEST_CALL = 64 * 1024  # bytes


class Deputy:
    """A listener in rank 1 that the other ranks can call; its address travels through ``store``. Collective.

    Nothing is connected before it is needed: there is one thread, in rank 1, which waits for a call.

    Args:
        info: This rank.
        store: Of the job.
        address: Where other ranks reach this one; asked in rank 1.
        heard: Called in rank 1 with what another rank said, in a thread.
    """

    def __init__(
        self, info: RankInfo, store: Store, address: Callable[[], str], heard: Callable[[Message], None]
    ) -> None:
        store = PrefixStore("lightning_ring/deputy", store)
        self._heard = heard
        if info.rank == 1 and info.world_size > 2:
            self._token = secrets.token_hex(16)
            self._listener = listen("127.0.0.1" if info.num_nodes == 1 else "")
            os.register_at_fork(after_in_child=self._listener.close)
            store.set("place", json.dumps([address(), self._listener.getsockname()[1], self._token]))
            threading.Thread(target=self._serve, name="ring-deputy", daemon=True).start()
        elif info.rank > 1:
            host, port, self._token = json.loads(store.get("place"))
            self._place = (host, port)

    def call(self, message: Message) -> bool:
        """From rank 2 or higher: tell rank 1; whether it listened."""
        line = json.dumps(message | {"token": self._token}).encode() + b"\n"
        try:
            with socket.create_connection(self._place, timeout=CALL_SECONDS) as connection:
                connection.sendall(line)
                return connection.recv(1) == b"+"
        except OSError:
            return False

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CALL_SECONDS)
                message = self._read(connection)
                if message is not None and not _hung_up(connection):
                    self._heard(message)
                    connection.sendall(b"+")

    def _read(self, connection: socket.socket) -> Message | None:
        with connection.makefile("rb") as stream:
            message = parse(stream.readline(_LONGEST_CALL))
        return message if message is not None and message.get("token") == self._token else None


def _hung_up(connection: socket.socket) -> bool:
    """Whether the caller gave up, as this rank was stopped when it called."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(CALL_SECONDS)
