"""Messages of the job watch: one JSON object a line, over a non-blocking TCP connection."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

LONGEST_LINE = 4 * 1024 * 1024  # bytes; the stacks of all ranks fit
# a peer that acknowledges nothing for so long is lost: its host is down, or the link is cut
LOST_SECONDS = 15


class MessageConnection:
    """One end of a connection. Not thread-safe.

    The kernel notices a lost host within `LOST_SECONDS`. It answers for a busy or stopped process,
    so a rank stuck in C code is not taken for dead.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform.startswith("linux"):
            for option, value in (
                (socket.TCP_KEEPIDLE, 5),
                (socket.TCP_KEEPINTVL, 3),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket = connection
        self.longest_line = LONGEST_LINE  # bytes
        self.unsent = bytearray()
        self._received = b""
        self._early: list[Message] = []  # that `next` left

    def send(self, message: Message) -> None:
        """Queue ``message`` and send what the kernel takes; `flush` sends the rest."""
        self.send_line(as_line(message))

    def send_line(self, line: bytes) -> None:
        self.unsent += line
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it. Errors show when reading."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def wait(self, seconds: float, *, to_send: bool = False) -> None:
        """Return when something arrives, or the kernel takes more, or after ``seconds``.

        `select` refuses file descriptors above 1023.
        """
        if self._early and not to_send:
            return
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT if to_send else select.POLLIN)
        poll.poll(seconds * 1000)

    def next(self, seconds: float) -> tuple[Message | None, str | None]:
        """The next message, or why there is none: ``"nothing"``, or that of `receive`."""
        until, over = time.monotonic() + seconds, None
        while not self._early:
            self._early, over = self.receive()
            left = until - time.monotonic()
            if self._early or over is not None or left <= 0:
                break
            self.wait(left)
        return (self._early.pop(0), None) if self._early else (None, over or "nothing")

    def receive(self) -> tuple[list[Message], str | None]:
        """Whole messages, and, once the connection is over, why (``"closed"`` or the error)."""
        over: str | None = None
        try:
            while True:
                part = self.socket.recv(min(65536, self.longest_line + 1))
                if not part:
                    over = "closed"
                    break
                self._received += part
                if len(self._received) > self.longest_line:
                    if max(map(len, self._received.split(b"\n"))) > self.longest_line:
                        over = "a message too long"
                    break  # of many messages the rest comes with the next call
        except BlockingIOError:
            pass
        except OSError as error:
            over = error.strerror or str(error)
        *lines, self._received = self._received.split(b"\n")
        messages, self._early = self._early, []
        for line in lines:
            if (message := parse(line)) is None:
                return messages, "a line that is no message"
            messages.append(message)
        return messages, over

    def close(self) -> None:
        self.socket.close()


def in_forked_children(method: Callable[[], None]) -> None:
    """Call the bound ``method`` in every forked process, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)


def as_line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> Message | None:
    """The message on ``line``; `None` for anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # lists in lists
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
