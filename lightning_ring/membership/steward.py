"""The server of the membership: one thread of the process that started the ranks, and that outlives all of them.

It holds one connection to each rank, the `Roster` and the store of the current view. It needs no torch, and is never
a rank: memory and time that a training takes, or its death, do not touch it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from lightning_ring.errors import RingError
from lightning_ring.job.watch.messages import Message, MessageConnection
from lightning_ring.membership.agreement import Report
from lightning_ring.membership.key_value import KeyValue
from lightning_ring.membership.roster import Roster


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection; ``member`` is None until it has said who it is."""

    connection: MessageConnection
    member: int | None = None


class Steward:
    """Serves the members of ``roster`` on ``host``. `step` does everything; it is called again and again.

    ``kill`` ends a process at once. It is called for every member that is counted out, since a process that is
    only slow, or cut off, must not write any more; `gone` has to follow. Not thread-safe.
    """

    def __init__(self, roster: Roster, kill: Callable[[int], None], host: str = "127.0.0.1") -> None:
        self.roster = roster
        self.ended: str | None = None  # why the job is over, once it is
        self._kill = kill
        self._token = token_hex(16)
        self._store = KeyValue()
        self._guests: dict[int, _Guest] = {}  # by member
        self._told_to_stop = True
        self._invited = False
        self._why = ""
        self._door = socket.create_server((host, 0), backlog=1024)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, None)

    def variables(self, member: int) -> dict[str, str]:
        """The environment variables by which process ``member`` finds the steward (`Member`)."""
        host, port = self._door.getsockname()[:2]
        return {"RING_STEWARD": f"{host}:{port}", "RING_STEWARD_TOKEN": self._token, "RING_MEMBER": str(member)}

    def step(self, timeout: float) -> None:
        """Serve what has arrived, and wait up to ``timeout`` seconds for more."""
        for key, events in self._selector.select(timeout):
            guest: _Guest | None = key.data
            if guest is None:
                self._accept()
            elif events & selectors.EVENT_READ:
                self._read(guest)
            else:
                self._flush(guest)
        self._advance()

    def expect(self, member: int) -> None:
        """Process ``member`` was started."""
        self.roster.expect(member)

    def gone(self, member: int, why: str) -> None:
        """Process ``member`` was seen to be dead, or on its way out of the kernel."""
        self._lose(member, why)
        self.roster.bury(member)
        self._advance()

    def end(self, why: str) -> None:
        """Tell everybody that the job is over: members save what they have, and leave."""
        if self.ended is None:
            self.ended = why
            self._store.close(why)
            for member in [*self.roster.members, *self.roster.newcomers]:
                self._tell(member, {"kind": "end", "why": why, "finished": self.roster.finished})

    def close(self) -> None:
        for guest in self._guests.values():
            guest.connection.close()
        self._door.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._door.accept()
        except OSError:
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(accepted, selectors.EVENT_READ, _Guest(MessageConnection(accepted)))

    def _read(self, guest: _Guest) -> None:
        messages, over = guest.connection.receive()
        for message in messages:
            if guest.member is None and not self._welcome(guest, message):
                over = "not a member of this job"
                break
            self._take(guest, message)
        if over is not None:
            self._selector.unregister(guest.connection.socket)
            guest.connection.close()
            if guest.member is not None:
                self._guests.pop(guest.member, None)
                self._lose(guest.member, "its connection ended")

    def _welcome(self, guest: _Guest, message: Message) -> bool:
        if message["kind"] != "hello" or message.get("token") != self._token:
            return False
        guest.member = message["member"]
        self._guests[message["member"]] = guest
        return True

    def _take(self, guest: _Guest, message: Message) -> None:
        kind, member = message["kind"], guest.member
        assert member is not None
        if kind == "report":
            self.roster.report(member, message["generation"], Report(message["step"], message["complete"]))
            self._why = self._why or "newcomers wait"
            if self.ended is not None:
                self._tell(member, {"kind": "end", "why": self.ended, "finished": self.roster.finished})
        elif kind == "store":
            self._serve(guest, message)
        elif kind == "finished":
            self.roster.finish(member)
            for other in self.roster.members:
                self._tell(other, {"kind": "finisher"})
        elif kind == "failed":
            self.end(message["text"])

    def _serve(self, guest: _Guest, message: Message) -> None:
        number, view = message["number"], self.roster.view

        def answer(result: dict[str, Any]) -> None:
            if guest.member is not None and self._guests.get(guest.member) is guest:  # it may have gone meanwhile
                guest.connection.send({"kind": "answer", "number": number, **result})
                self._flush(guest)

        if self.roster.stopping or view is None or message["generation"] != view.generation:
            answer({"refused": f"generation {message['generation']} is over ({self._why or 'a new one has begun'})"})
        else:
            self._store.request(message, answer)

    def _lose(self, member: int, why: str) -> None:
        if self.roster.lose(member):
            self._why = f"process {member} has died: {why}"
            self._kill(member)

    def _advance(self) -> None:
        """Whatever follows from the state of the roster."""
        if self.ended is not None:
            return
        if self.roster.stopping and not self._told_to_stop and self.roster.view is not None:
            self._told_to_stop = True
            self._store.close(f"generation {self.roster.view.generation} is over ({self._why})")
            for member in self.roster.members:
                self._tell(member, {"kind": "stop", "generation": self.roster.view.generation, "why": self._why})
        try:
            view = self.roster.next_view()
        except RingError as error:
            self.end(f"{type(error).__name__}: {error}")
            return
        if view is not None:
            self._store, self._told_to_stop, self._why = KeyValue(), False, ""
            self._invited = False
            for member in view.members:
                self._tell(member, view.as_message())
        if self.roster.admits and not self._invited:
            self._invited = True
            for member in self.roster.members:
                self._tell(member, {"kind": "newcomers"})
        if self.roster.finished:
            self.end("the training has finished")

    def _tell(self, member: int, message: Message) -> None:
        guest = self._guests.get(member)
        if guest is not None:
            guest.connection.send(message)
            self._flush(guest)

    def _flush(self, guest: _Guest) -> None:
        guest.connection.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.connection.unsent else 0)
        with contextlib.suppress(KeyError, ValueError):  # it has just been closed
            self._selector.modify(guest.connection.socket, events, guest)
