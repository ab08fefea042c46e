"""The server of the membership: one thread of the process that started the ranks, and that outlives all of them.

It holds one connection to each rank, the `Membership` and the store of the current view. It needs no torch, and is
never a rank: memory and time that a training takes, or its death, do not touch it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from lightning_ring.errors import RingError
from lightning_ring.job.exit import say
from lightning_ring.job.watch.messages import Message, MessageConnection
from lightning_ring.membership.agreement import Report
from lightning_ring.membership.key_value import KeyValue
from lightning_ring.membership.membership import Membership
from lightning_ring.membership.silence import Silence, SilenceLimits

_PING_SECONDS = 1.0
_HELLO_SECONDS = 10.0  # in which a connection has to say which process it is
_LEAVING_SECONDS = 2.0  # between the end of a connection and that of its process
_FULL_SECONDS = 0.5  # without accepting connections, when this process can open no more files


@dataclass(slots=True, eq=False)
class _Client:
    """A connection; ``member`` is None until it has said which process it is."""

    connection: MessageConnection
    since: float
    member: int | None = None


class Steward:
    """Serves the members of ``membership`` on ``host``. `step` does everything; it is called again and again.

    ``kill(member, why, seconds)`` ends a process that has not ended by itself after ``seconds``. It is called for every
    member that is removed, since a process that is only slow, or cut off, must not write any more; `gone` has to
    follow. ``idle`` is that of `Silence`. Not thread-safe.

    Attributes:
        ended: Why the job is over, once it is.
        pids: Of the processes that have connected, as they say themselves.
        last_words: What processes said about their failure that were in no view.
    """

    def __init__(
        self,
        membership: Membership,
        kill: Callable[[int, str, float], None],
        host: str = "127.0.0.1",
        silence: SilenceLimits | None = None,
        idle: Callable[[int], float] = lambda member: 0.0,
    ) -> None:
        self.membership = membership
        self.ended: str | None = None
        self.pids: dict[int, int] = {}
        self.last_words: dict[int, str] = {}
        self._kill = kill
        self._token = token_hex(16)
        self._store = KeyValue()
        self._silence = Silence(silence or SilenceLimits(), idle)
        self._clients: dict[int, _Client] = {}  # by member
        self._unknown: set[_Client] = set()  # that have not said which process they are
        self._told_to_stop = True
        self._told_of_newcomers = False
        self._why = ""
        self._next_ping = 0.0
        self._accepts_at: float | None = None
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def variables(self, member: int, host: str | None = None) -> dict[str, str]:
        """The environment variables by which process ``member`` finds the steward (`Member`), at address ``host``."""
        host = host or self._listener.getsockname()[0]
        return {"RING_STEWARD": f"{host}:{self.port}", "RING_STEWARD_TOKEN": self._token, "RING_MEMBER": str(member)}

    def step(self, timeout: float) -> None:
        """Serve what has arrived, and wait up to ``timeout`` seconds for more."""
        for key, events in self._selector.select(timeout):
            client: _Client | None = key.data
            if client is None:
                self._accept()
            elif events & selectors.EVENT_READ:
                self._read(client)
            else:
                self._flush(client)
        self._look_at_the_clock(time.monotonic())
        self._advance()

    def expect(self, member: int) -> None:
        """Process ``member`` was started."""
        self.membership.expect(member)

    def gone(self, member: int, why: str) -> None:
        """Process ``member`` was seen to be dead, or on its way out of the kernel."""
        self._remove(member, why)
        self.membership.fenced(member)
        self._advance()

    def end(self, why: str) -> None:
        """Tell everybody that the job is over: members save what they have, and leave."""
        if self.ended is None:
            self.ended = why
            self._store.close(why)
            for member in [*self.membership.members, *self.membership.newcomers]:
                self._tell(member, {"kind": "end", "why": why, "finished": self.membership.finished})

    def close(self) -> None:
        for client in [*self._clients.values(), *self._unknown]:
            client.connection.close()
        self._listener.close()
        self._selector.close()

    # -- connections

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors: the listener would wake this thread again and again
            say(f"the steward accepts no connections for {_FULL_SECONDS:g} s: {error.strerror}")
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + _FULL_SECONDS
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(MessageConnection(accepted), time.monotonic())
        self._unknown.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _look_at_the_clock(self, now: float) -> None:
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for client in [client for client in self._unknown if now - client.since > _HELLO_SECONDS]:
            self._hang_up(client)
        if self.ended is not None:
            return
        if now >= self._next_ping:
            self._next_ping = now + _PING_SECONDS
            for member in self._clients:
                self._tell(member, {"kind": "ping"})
        for member, why in self._silence.look(now, self.membership).items():
            self._remove(member, why, 0.0)

    def _read(self, client: _Client) -> None:
        messages, over = client.connection.receive()
        for message in messages:
            if client.member is not None:
                self._silence.heard(client.member)
                self._take(client.member, message)
            elif not self._welcome(client, message):
                over = "not a member of this job"
                break
        if over is not None:
            self._hang_up(client)
            if client.member is not None:
                self._remove(client.member, "its connection ended")

    def _hang_up(self, client: _Client) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection.socket)
        client.connection.close()
        self._unknown.discard(client)
        if client.member is not None and self._clients.get(client.member) is client:
            del self._clients[client.member]
            self._silence.forget(client.member)

    def _welcome(self, client: _Client, message: Message) -> bool:
        member = message.get("member")
        if message["kind"] != "hello" or message.get("token") != self._token or not isinstance(member, int):
            return False
        if member in self._clients or not self.membership.knows(member):
            taken = f"is process {self.pids[member]} already" if member in self._clients else "takes part no more"
            client.connection.send({"kind": "refused", "why": f"process {member} of the job {taken}"})
            return False
        client.member = member
        self.pids[member] = message["pid"]
        self._unknown.discard(client)
        self._clients[member] = client
        self._silence.heard(member)
        self._tell(member, {"kind": "welcome"})
        return True

    def _tell(self, member: int, message: Message) -> None:
        client = self._clients.get(member)
        if client is not None:
            client.connection.send(message)
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        client.connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.connection.unsent else 0)
        with contextlib.suppress(KeyError, ValueError):  # it has just been closed
            self._selector.modify(client.connection.socket, events, client)

    # -- messages

    def _take(self, member: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "report":
            self.membership.report(member, message["generation"], Report(message["step"], message["complete"]))
            self._why = self._why or (
                "newcomers wait" if self.membership.newcomers else f"process {member} connects anew"
            )
            if self.ended is not None:
                self._tell(member, {"kind": "end", "why": self.ended, "finished": self.membership.finished})
        elif kind == "store":
            self._serve(member, message)
        elif kind == "finished":
            self.membership.finish(member)
            self._tell(member, {"kind": "noted"})
            for other in self.membership.members:
                self._tell(other, {"kind": "finisher"})
        elif kind == "failed":
            if self.membership.view is not None and not self.membership.was_member(member):
                self.last_words[member] = message["text"]  # the others go on: it fails on its own host
            else:
                self.end(message["text"])

    def _serve(self, member: int, message: Message) -> None:
        number, view = message["number"], self.membership.view

        def answer(result: dict[str, Any]) -> None:
            self._tell(member, {"kind": "answer", "number": number, **result})

        if self.membership.stopping or view is None or message["generation"] != view.generation:
            answer({"refused": f"generation {message['generation']} is over ({self._why or 'a new one has begun'})"})
        else:
            self._store.request(message, answer)

    def _remove(self, member: int, why: str, seconds: float = _LEAVING_SECONDS) -> None:
        if self.membership.remove(member):
            self._why = f"process {member} has died: {why}"
            self._kill(member, why, seconds)
            if (client := self._clients.get(member)) is not None:
                self._hang_up(client)  # it ends by itself where nobody can kill it

    def _advance(self) -> None:
        """Whatever follows from the state of the membership."""
        if self.ended is not None:
            return
        view = self.membership.view
        if self.membership.stopping and not self._told_to_stop and view is not None:
            self._told_to_stop = True
            self._store.close(f"generation {view.generation} is over ({self._why})")
            for member in self.membership.members:
                self._tell(member, {"kind": "stop", "generation": view.generation, "why": self._why})
        try:
            view = self.membership.next_view()
        except RingError as error:
            self.end(f"{type(error).__name__}: {error}")
            return
        if view is not None:
            self._store, self._told_to_stop, self._why = KeyValue(), False, ""
            self._told_of_newcomers = False
            for member in view.members:
                self._tell(member, view.as_message())
        if self.membership.admits and not self._told_of_newcomers:
            self._told_of_newcomers = True
            for member in self.membership.members:
                self._tell(member, {"kind": "newcomers"})
        if self.membership.finished:
            self.end("the training has finished")
