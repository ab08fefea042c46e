"""The steward's connections: who may connect, what arrives from whom, and what is told to whom."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Protocol

from lightning_ring.job.exit import say
from lightning_ring.job.watch.messages import LONGEST_LINE, Message, MessageConnection, is_token

_HELLO_SECONDS = 10.0  # in which a connection has to say which process it is
_HELLO_BYTES = 4096
_FULL_SECONDS = 0.5  # without accepting connections, when this process can open no more files


class Server(Protocol):
    """What `Connections` calls."""

    def take(self, member: int, message: Message) -> None:
        """``member`` has sent ``message``."""

    def hung_up(self, member: int) -> None:
        """The connection of ``member`` has ended."""


@dataclass(slots=True, eq=False)
class _Client:
    """A connection; ``member`` is None until it has said which process it is."""

    connection: MessageConnection
    since: float
    member: int | None = None


class Connections:
    """One connection to each member, at a listener on ``host``. ``knows(member)``: whether a
    process may take part.

    `serve` does everything; it is called again and again.

    Attributes:
        members: The members that are connected.
        pids: Of the processes that have connected, as they say themselves.
    """

    def __init__(self, server: Server, knows: Callable[[int], bool], host: str) -> None:
        self.pids: dict[int, int] = {}
        self._server = server
        self._knows = knows
        self._token = token_hex(16)
        self._clients: dict[int, _Client] = {}  # by member
        self._unknown: set[_Client] = set()  # that have not said which process they are
        self._accepts_at: float | None = None
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    @property
    def members(self) -> list[int]:
        return list(self._clients)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def variables(self, member: int, host: str | None = None) -> dict[str, str]:
        """The environment variables by which process ``member`` connects (`Member`), at address
        ``host``.
        """
        host = host or self._listener.getsockname()[0]
        return {
            "RING_STEWARD": f"{host}:{self.port}",
            "RING_STEWARD_TOKEN": self._token,
            "RING_MEMBER": str(member),
        }

    def serve(self, timeout: float) -> None:
        """Serve what has arrived, and wait up to ``timeout`` seconds for more."""
        for key, events in self._selector.select(timeout):
            client: _Client | None = key.data
            if client is None:
                self._accept()
            elif events & selectors.EVENT_READ:
                self._read(client)
            else:
                self._flush(client)
        now = time.monotonic()
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for client in [client for client in self._unknown if now - client.since > _HELLO_SECONDS]:
            self._close(client)

    def tell(self, member: int, message: Message) -> None:
        """Send ``message`` to ``member``, if it is connected."""
        client = self._clients.get(member)
        if client is not None:
            client.connection.send(message)
            self._flush(client)

    def hang_up(self, member: int) -> None:
        if (client := self._clients.get(member)) is not None:
            self._close(client)

    def close(self) -> None:
        for client in [*self._clients.values(), *self._unknown]:
            client.connection.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        # out of file descriptors: the listener would wake this thread again and again
        except OSError as error:
            say(f"the steward accepts no connections for {_FULL_SECONDS:g} s: {error.strerror}")
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + _FULL_SECONDS
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(MessageConnection(accepted), time.monotonic())
        # a stranger must not fill this process's memory
        client.connection.longest_line = _HELLO_BYTES
        self._unknown.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        messages, over = client.connection.receive()
        for message in messages:
            if client.member is not None:
                self._server.take(client.member, message)
            elif not self._welcome(client, message):
                over = "not a member of this job"
                break
        if over is not None:
            self._close(client)
            if client.member is not None:
                self._server.hung_up(client.member)

    def _welcome(self, client: _Client, message: Message) -> bool:
        member, pid = message.get("member"), message.get("pid")
        if message["kind"] != "hello" or not is_token(message.get("token"), self._token):
            return False
        if type(member) is not int or type(pid) is not int:  # not a bool either
            return False
        if member in self._clients or not self._knows(member):
            taken = (
                f"is process {self.pids[member]} already"
                if member in self._clients
                else "takes part no more"
            )
            client.connection.send(
                {"kind": "refused", "why": f"process {member} of the job {taken}"}
            )
            return False
        client.member = member
        client.connection.longest_line = LONGEST_LINE
        self.pids[member] = pid
        self._unknown.discard(client)
        self._clients[member] = client
        self.tell(member, {"kind": "welcome"})
        self._server.take(member, message)
        return True

    def _flush(self, client: _Client) -> None:
        client.connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.connection.unsent else 0)
        with contextlib.suppress(KeyError, ValueError):  # it has just been closed
            self._selector.modify(client.connection.socket, events, client)

    def _close(self, client: _Client) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection.socket)
        client.connection.close()
        self._unknown.discard(client)
        if client.member is not None and self._clients.get(client.member) is client:
            del self._clients[client.member]
