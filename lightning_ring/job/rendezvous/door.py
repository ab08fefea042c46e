"""The door of every listener of a job. Whoever connects is a stranger until it has proved that it
knows the job's secret, and strangers cost little.

Each side proves itself by an HMAC over the other's nonce. So the secret is never sent, and what was
overheard cannot be said again:

    door       {"kind": "challenge", "nonce": D}
    newcomer   {"kind": "hello", "nonce": N, ..., "proof": HMAC(secret, D and the message)}
    door       {"kind": "welcome", ..., "proof": HMAC(secret, N and the message)}

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Protocol

from lightning_ring.job.watch.messages import (
    LONGEST_LINE,
    Message,
    MessageConnection,
    as_line,
    in_forked_children,
)

SECRET = "RING_SECRET"  # the variable by which launchers hand it to their ranks
HELLO_SECONDS = 10.0  # however its bytes arrive
HELLO_BYTES = 4096
# at a time, besides those that are expected: the oldest is dropped for the next
MOST_STRANGERS = 128
BACKLOG = 4096  # that come at once; systems take no more by default
ANSWER_SECONDS = 5.0
_ACCEPTS = 32  # connections in one pass
_ATTEMPT_SECONDS = 5.0
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(Protocol):
    """What a `Door` calls. A guest is whatever `admit` calls it."""

    def admit(self, hello: Message) -> tuple[Any, Message]:
        """The guest who says ``hello``, and what its welcome tells it.

        Raises:
            PermissionError: It knows the secret, and takes no part: why.
        """

    def take(self, guest: Any, message: Message) -> None:
        """``guest`` has sent ``message``; its hello is the first."""

    def hung_up(self, guest: Any, why: str) -> None:
        """The connection of ``guest`` has ended (`MessageConnection.receive`)."""


@dataclass(slots=True, eq=False)
class _Visitor:
    connection: MessageConnection
    nonce: str
    until: float
    guest: Any = None


class Door:
    """Lets in whoever knows ``secret`` at ``listener``, and passes on what guests send.

    A proof is only valid at the door of its ``name``. Call `serve` again and again, or
    `serve_in_thread`.

    Attributes:
        guests: Those that are connected.
        expected: The number of guests that may come at once, those that are here included.
    """

    def __init__(
        self, listener: socket.socket, secret: str, name: str, server: Server, expected: int = 0
    ) -> None:
        self.guests: dict[Any, _Visitor] = {}
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._key = _key(secret, name)
        self._server = server
        self._strangers: dict[_Visitor, None] = {}  # the oldest first
        self.expected = expected
        self._reserve = socket.socket()  # an open file
        self._closing = False
        self._thread: threading.Thread | None = None
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        in_forked_children(self._close_sockets)

    def serve(self, timeout: float) -> None:
        """Serve what has arrived; wait up to ``timeout`` seconds for more."""
        for key, events in self._selector.select(timeout):
            visitor: _Visitor | None = key.data
            if visitor is None:
                self._accept()
            elif visitor.connection.socket.fileno() == -1:
                continue
            elif events & selectors.EVENT_READ:
                self._read(visitor)
            else:
                self._flush(visitor)
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers))).until < now:
            self._close(oldest)

    def serve_in_thread(self, name: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Serve in a thread until `close`, or until nobody else ``is_over()`` to come."""

        def serve() -> None:
            while not self._closing and not is_over():
                self.serve(0.5)
            self._close_all()

        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message, *guests: Any) -> None:
        line = as_line(message)
        for guest in guests:
            if (visitor := self.guests.get(guest)) is not None:
                visitor.connection.send_line(line)
                self._flush(visitor)

    def hang_up(self, guest: Any) -> None:
        if (visitor := self.guests.get(guest)) is not None:
            self._close(visitor)

    def close(self) -> None:
        """Close all connections. The kernel still delivers what was sent."""
        if self._thread is None:
            self._close_all()
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, as a close does not
        self._thread.join(timeout=2)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self._turn_away()
                return
            connection = MessageConnection(accepted)
            connection.longest_line = HELLO_BYTES
            visitor = _Visitor(connection, token_hex(16), time.monotonic() + HELLO_SECONDS)
            self._strangers[visitor] = None
            self._selector.register(accepted, selectors.EVENT_READ, visitor)
            connection.send({"kind": "challenge", "nonce": visitor.nonce})
            most = MOST_STRANGERS + max(0, self.expected - len(self.guests))
            if len(self._strangers) > most:
                self._close(next(iter(self._strangers)))

    def _turn_away(self) -> None:
        """This process can open no more files: drop strangers, and the next one later."""
        for stranger in list(self._strangers):
            self._close(stranger)
        self._reserve.close()
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            with accepted:
                accepted.send(b'{"kind": "full"}\n')
        with contextlib.suppress(OSError):
            self._reserve = socket.socket()
        # The listener stays ready while another thread holds the last file.
        time.sleep(0.01)

    def _read(self, visitor: _Visitor) -> None:
        messages, over = visitor.connection.receive()
        has_spoken = visitor.guest is None and (messages or over is not None)
        if has_spoken and (len(messages) != 1 or not self._welcome(visitor, messages[0])):
            self._close(visitor)
            return
        for message in messages:
            self._server.take(visitor.guest, message)
        if over is not None:
            self._close(visitor)
            self._server.hung_up(visitor.guest, over)

    def _welcome(self, visitor: _Visitor, hello: Message) -> bool:
        connection, nonce = visitor.connection, str(hello.get("nonce"))
        if hello["kind"] != "hello" or not _is_proved(self._key, visitor.nonce, hello):
            connection.send({"kind": "refused"})
            return False
        try:
            guest, told = self._server.admit(hello)
        except PermissionError as refusal:
            connection.send(_proved(self._key, nonce, {"kind": "refused", "why": str(refusal)}))
            return False
        except (KeyError, TypeError):
            # Without RING_SECRET a stranger can come this far.
            connection.send({"kind": "refused"})
            return False
        visitor.guest = guest
        del self._strangers[visitor]
        self.guests[guest] = visitor
        connection.longest_line = LONGEST_LINE
        self.send(_proved(self._key, nonce, {"kind": "welcome", **told}), guest)
        return True

    def _flush(self, visitor: _Visitor) -> None:
        connection = visitor.connection
        connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, visitor)

    def _close(self, visitor: _Visitor) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(visitor.connection.socket)
        visitor.connection.close()
        self._strangers.pop(visitor, None)
        if self.guests.get(visitor.guest) is visitor:
            del self.guests[visitor.guest]

    def _close_all(self) -> None:
        self._close_sockets()
        self._selector.close()
        self._reserve.close()

    def _close_sockets(self) -> None:
        """A forked child must not hold the connections open when its parent is killed."""
        self._listener.close()
        for visitor in [*self._strangers, *self.guests.values()]:
            visitor.connection.close()


class NotOurDoor(ConnectionError):
    """Another program answers there, or another job."""


def knock(
    addresses: Sequence[str],
    port: int,
    secret: str,
    name: str,
    hello: Message,
    seconds: float,
    *,
    once: bool = False,
    answer_seconds: float = ANSWER_SECONDS,
) -> tuple[MessageConnection, Message]:
    """Connect to the `Door` ``name`` at one of ``addresses``; the connection, and the welcome.

    Tries again for ``seconds``, unless ``once``: the door may not be open yet, or may have dropped
    this connection. An address where another program answers, or nothing for ``answer_seconds``, is
    not tried again.

    Raises:
        PermissionError: The door refuses this process: why.
        NotOurDoor: Another program answers at all addresses.
        OSError: None could be reached.
    """
    key, until = _key(secret, name), time.monotonic() + seconds
    left, failures = list(addresses), dict.fromkeys(addresses, "not tried")
    while left:
        for address in list(left):
            try:
                wait = min(_ATTEMPT_SECONDS, max(0.1, until - time.monotonic()))
                connection = MessageConnection(socket.create_connection((address, port), wait))
                try:
                    return connection, _enter(connection, key, hello, answer_seconds)
                except BaseException:
                    connection.close()
                    raise
            except PermissionError:
                raise
            except OSError as error:
                failures[address] = str(error)
                if isinstance(error, NotOurDoor):
                    left.remove(address)
        if once or time.monotonic() > until:
            break
        time.sleep(0.1)
    told = "; ".join(f"{address}: {why}" for address, why in failures.items())
    raise OSError(told) if left else NotOurDoor(told)


def _enter(connection: MessageConnection, key: bytes, hello: Message, seconds: float) -> Message:
    challenge, over = connection.next(seconds)
    if challenge is not None and challenge["kind"] == "full":
        raise ConnectionResetError("it can open no more files")
    if over == os.strerror(errno.ECONNRESET):
        raise ConnectionResetError(over)
    if challenge is None or challenge["kind"] != "challenge":
        raise NotOurDoor(f"another program answered ({over or 'something else'})")
    nonce = token_hex(16)
    own = {"kind": "hello", "nonce": nonce, **hello}
    connection.send(_proved(key, str(challenge.get("nonce")), own))
    welcome, over = connection.next(seconds)
    if welcome is None and over != "nothing":
        raise ConnectionResetError(f"it hung up ({over})")
    if welcome is None or not _is_proved(key, nonce, welcome):
        raise NotOurDoor("another job, or another program, answered")
    if welcome["kind"] != "welcome":
        raise PermissionError(welcome.get("why"))
    return welcome


def _key(secret: str, name: str) -> bytes:
    assert secret, "a door takes a secret"
    return f"{name} {secret}".encode()


def _proof(key: bytes, nonce: str, message: Message) -> str:
    text = json.dumps([nonce, message], sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _proved(key: bytes, nonce: str, message: Message) -> Message:
    return message | {"proof": _proof(key, nonce, message)}


def _is_proved(key: bytes, nonce: str, message: Message) -> bool:
    """Takes the proof out of ``message``."""
    given = str(message.pop("proof", "")).encode(errors="replace")
    return hmac.compare_digest(given, _proof(key, nonce, message).encode())
