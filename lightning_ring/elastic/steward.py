"""The server of the membership: one thread of the process that started the ranks.

It holds one connection to each rank, the `Membership` and the store of the current view. It needs
no torch, so that no training takes it down.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from lightning_ring.elastic.membership import Membership, Report
from lightning_ring.errors import RingError
from lightning_ring.job.rendezvous.door import BACKLOG, SECRET, Door
from lightning_ring.job.watch.messages import Message

DOOR = "steward"

Answer = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class _Wait:
    """A request for keys, the first ``num_seen`` of which are there."""

    message: dict[str, Any]
    answer: Answer
    num_seen: int = 0


class KeyValue:
    """Values are texts. A request is a message with ``"op"``; its answer may be a refusal.

    ``get`` and ``wait`` are answered once their keys are there; all others at once.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[_Wait]] = {}

    def request(self, message: dict[str, Any], answer: Answer) -> None:
        op = message["op"]
        if op in ("get", "wait"):
            self._await(_Wait(message, answer))
        elif op == "set":
            self._values[message["key"]] = message["value"]
            answer({"value": None})
        elif op == "add":
            total = int(self._values.get(message["key"], "0")) + message["value"]
            self._values[message["key"]] = str(total)
            answer({"value": total})
        elif op == "compare_set":
            answer(
                {"value": self._compare_set(message["key"], message["expected"], message["value"])}
            )
        elif op == "check":
            answer({"value": self._has(message["keys"])})
        elif op == "delete":
            answer({"value": self._values.pop(message["key"], None) is not None})
        elif op == "count":
            answer({"value": len(self._values)})
        else:
            answer({"refused": f"the store knows no operation {op!r}"})
        if "key" in message and message["key"] in self._values:
            for wait in self._waiting.pop(message["key"], ()):
                self._await(wait)

    def close(self, reason: str) -> None:
        """Refuse what waits. Later requests belong to another `KeyValue`."""
        waiting, self._waiting = self._waiting, {}
        for wait in itertools.chain.from_iterable(waiting.values()):
            wait.answer({"refused": reason})
        self._values.clear()

    def _compare_set(self, key: str, expected: str, value: str) -> str:
        """As torch's: an absent key takes ``value`` only if nothing (``""``) is expected."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = current = value
        return expected if current is None else current

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _await(self, wait: _Wait) -> None:
        keys = wait.message["keys"]
        while wait.num_seen < len(keys) and keys[wait.num_seen] in self._values:
            wait.num_seen += 1
        if wait.num_seen < len(keys):
            self._waiting.setdefault(keys[wait.num_seen], []).append(wait)
        elif not self._has(keys):
            wait.num_seen = 0
            self._await(wait)
        else:
            gets = wait.message["op"] == "get"
            wait.answer({"value": [self._values[key] for key in keys] if gets else None})


_LOOK_SECONDS = 0.2
# seconds between two looks; the rest was the steward's own absence
_LONGEST_GAP = 0.5


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a process that says nothing is removed.

    ``answer``: seconds without an answer and without processor time: the process is stopped, or
    hangs. ``start``: the same for a process that is not ready, while others are: it may load from a
    slow disk. ``report``: seconds for which a member keeps ready ones waiting, whether it computes
    or not.
    """

    answer: float = 10.0
    start: float = 300.0
    report: float = 600.0


class Silence:
    """Finds members that are silent for too long. `look` gets the monotonic clock's time.

    ``idle(member)``: seconds in which a process used no processor time, if known.
    """

    def __init__(self, limits: SilenceLimits, idle: Callable[[int], float]) -> None:
        self._limits = limits
        self._idle = idle
        self._heard: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._next_look = 0.0
        self._now = 0.0
        self._last_look: float | None = None

    def heard(self, member: int) -> None:
        self._heard[member] = self._now

    def forget(self, member: int) -> None:
        self._heard.pop(member, None)

    def look(self, now: float, membership: Membership) -> dict[int, str]:
        """Members to remove, with the reasons."""
        self._now += (
            min(now - self._last_look, _LONGEST_GAP) if self._last_look is not None else 0.0
        )
        self._last_look = now
        if self._now < self._next_look:
            return {}
        self._next_look = self._now + _LOOK_SECONDS
        found: dict[int, str] = {}
        for member, heard in self._heard.items():
            quiet = self._quiet(member, heard)
            if quiet > self._limits.answer:
                found[member] = (
                    f"it has neither answered nor used processor time for {quiet:.0f} s (stopped, "
                    "or hung)"
                )
        starting, awaited = _starting(membership), _awaited(membership)
        self._since = {
            member: self._since.get(member, self._now) for member in [*starting, *awaited]
        }
        for member in starting:
            quiet = self._quiet(member, self._since[member])
            if quiet > self._limits.start:
                found.setdefault(
                    member,
                    f"it was started, and has used no processor time for {quiet:.0f} s (it hangs)",
                )
        for member in awaited:
            waited = self._now - self._since[member]
            if waited > self._limits.report:
                found.setdefault(member, f"the other ranks have waited for it for {waited:.0f} s")
        return found

    def _quiet(self, member: int, since: float) -> float:
        waited = self._now - since
        return (
            min(waited, self._idle(member))
            if waited > min(self._limits.answer, self._limits.start)
            else 0.0
        )


def _starting(membership: Membership) -> list[int]:
    starting = list(membership.expected)
    return starting if membership.view is not None or membership.newcomers else []


def _awaited(membership: Membership) -> list[int]:
    missing = membership.unreported
    return missing if len(missing) < len(membership.members) else []


_PING_SECONDS = 1.0
_LEAVING_SECONDS = 2.0  # between the end of a connection and that of its process
_MISFIT = "it does not fit the others"


class Steward:
    """Serves the members of ``membership`` on ``host``, by repeated calls of `step`.

    ``kill(member, why, seconds)`` ends a process that has not ended by itself after ``seconds``. It
    is called for every removed member, since a slow process must not write any more; `gone` has to
    follow. ``idle`` is that of `Silence`. Members know ``secret``, by default a new one. Not
    thread-safe.

    Attributes:
        pids: Of the processes that have connected, as they say themselves.
        ended: Why the job is over, once it is.
        exit_code: That of the job, once it is over before its training has finished.
        last_words: What processes said about their failure that were in no view.
        turned_away: Newcomers that did not fit. Others in their place would not fit either.
    """

    def __init__(
        self,
        membership: Membership,
        kill: Callable[[int, str, float], None],
        host: str = "127.0.0.1",
        silence: SilenceLimits | None = None,
        idle: Callable[[int], float] = lambda member: 0.0,
        secret: str | None = None,
    ) -> None:
        self.membership = membership
        self.pids: dict[int, int] = {}
        self.ended: str | None = None
        self.exit_code = 1
        self.last_words: dict[int, str] = {}
        self.turned_away: set[int] = set()
        self._kill = kill
        self._too_few = False
        self._store = KeyValue()
        self._silence = Silence(silence or SilenceLimits(), idle)
        self._host = host
        self._secret = secret or token_hex(16)
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._door = Door(listener, self._secret, DOOR, self)
        self._told_to_stop = True
        self._told_of_newcomers = False
        self._why = ""
        self._next_ping = 0.0

    @property
    def port(self) -> int:
        return self._door.port

    def variables(self, member: int, host: str | None = None) -> dict[str, str]:
        """The environment variables by which process ``member`` finds the steward at ``host``."""
        return {
            "RING_STEWARD": f"{host or self._host}:{self.port}",
            SECRET: self._secret,
            "RING_MEMBER": str(member),
        }

    def step(self, timeout: float) -> None:
        """Serve what has arrived; wait up to ``timeout`` seconds for more."""
        self._door.serve(timeout)
        if self.ended is None:
            self._look_for_silence(time.monotonic())
        self._advance()

    def expect(self, member: int) -> None:
        self.membership.expect(member)
        self._door.expected = len(self.membership.expected)

    def gone(self, member: int, why: str) -> None:
        """Process ``member`` was seen to be dead, or on its way out of the kernel."""
        self._remove(member, why)
        self.membership.fenced(member)
        self._advance()

    def end(self, why: str, *, exit_code: int = 1, too_few: bool = False) -> None:
        """Tell everybody that the job is over; with ``too_few`` members save what they have."""
        if self.ended is None:
            self.ended, self.exit_code, self._too_few = why, exit_code, too_few
            self._store.close(why)
            membership = self.membership
            self._tell_end(why, *membership.members, *membership.newcomers)

    def end_with_too_few(self, why: str) -> None:
        """As `end` with ``too_few``; ranks with parts of the state get a last view to save it."""
        if self.membership.end_with_last_view(why):
            self._advance()
        else:
            self.end(why, too_few=True)

    def close(self) -> None:
        self._door.close()

    def admit(self, hello: Message) -> tuple[int, Message]:
        member: int = hello["member"]
        if member in self._door.guests:
            raise PermissionError(
                f"process {member} of the job is process {self.pids[member]} already"
            )
        if not self.membership.knows(member):
            raise PermissionError(f"process {member} of the job takes part no more")
        self.pids[member] = hello["pid"]
        return member, {}

    def take(self, member: int, message: Message) -> None:
        self._silence.heard(member)
        kind = message["kind"]
        if kind == "hello":
            self._tell({"kind": "standing", "first_ranks": self.membership.first_ranks}, member)
        elif kind == "report":
            standing = {name: message[name] for name in Report.__dataclass_fields__}
            self.membership.report(member, message["generation"], Report(**standing))
            self._why = self._why or (
                "newcomers wait" if self.membership.newcomers else f"process {member} connects anew"
            )
            if self.ended is not None:
                self._tell_end(self.ended, member)
        elif kind == "store":
            self._serve(member, message)
        elif kind == "finished":
            self.membership.finish(member)
            self._tell({"kind": "noted"}, member)
        elif kind == "takes_part":
            self.membership.take_part(member)
        elif kind == "leaves_fit":
            self.membership.leave_fit(member, message["left"])
        elif kind == "turns_away":
            for newcomer in message["members"]:
                self._turn_away(newcomer)
        elif kind == "failed":
            if self.membership.view is not None and not self.membership.was_member(member):
                # the others go on: it fails on its own host
                self.last_words[member] = message["text"]
            elif self.membership.late - {member}:
                # a consequence of that death
                self.last_words[member] = message["text"]
            else:
                self.end(message["text"], exit_code=message["exit_code"])

    def hung_up(self, member: int, why: str) -> None:
        self._silence.forget(member)
        self._remove(member, "its connection ended")

    def _look_for_silence(self, now: float) -> None:
        if now >= self._next_ping:
            self._next_ping = now + _PING_SECONDS
            self._tell({"kind": "ping"}, *self._door.guests)
        for member, why in self._silence.look(now, self.membership).items():
            self._remove(member, why, 0.0)

    def _serve(self, member: int, message: Message) -> None:
        number, view = message["number"], self.membership.view

        def answer(result: dict[str, Any]) -> None:
            self._tell({"kind": "answer", "number": number, **result}, member)

        if self.ended is not None:
            answer({"refused": self.ended})  # whoever would set the key may have gone
        elif self.membership.stopping or view is None or message["generation"] != view.generation:
            answer(
                {
                    "refused": f"generation {message['generation']} is over "
                    f"({self._why or 'a new one has begun'})"
                }
            )
        else:
            self._store.request(message, answer)

    def _remove(self, member: int, why: str, seconds: float = _LEAVING_SECONDS) -> None:
        if self.membership.remove(member):
            when = " after the training had ended" * (member in self.membership.late)
            self._why = f"process {member} has died{when}: {why}"
            self._kill(member, why, seconds)
            self._silence.forget(member)
            self._door.hang_up(member)  # it ends by itself where nobody can kill it

    def _turn_away(self, newcomer: int) -> None:
        if not self.membership.was_member(newcomer) and newcomer not in self.turned_away:
            self.turned_away.add(newcomer)
            self.last_words[newcomer] = _MISFIT
            self._tell_end(f"for process {newcomer}, which does not fit the others", newcomer)
            self._remove(newcomer, _MISFIT)

    def _advance(self) -> None:
        if self.ended is not None:
            return
        view = self.membership.view
        if self.membership.stopping and not self._told_to_stop and view is not None:
            self._told_to_stop = True
            self._store.close(f"generation {view.generation} is over ({self._why})")
            stop = {"kind": "stop", "generation": view.generation, "why": self._why}
            self._tell(stop, *self.membership.members)
        try:
            view = self.membership.next_view()
        except RingError as error:
            self.end(f"{type(error).__name__}: {error}")
            return
        if view is not None:
            self._store, self._told_to_stop, self._why = KeyValue(), False, ""
            self._told_of_newcomers = False
            self._tell(view.as_message(), *view.members)
        if self.membership.admits and not self._told_of_newcomers:
            self._told_of_newcomers = True
            self._tell({"kind": "newcomers"}, *self.membership.members)
        if self.membership.finished:
            self.end("the training has finished")
        elif self.membership.last_word:
            self.end(self.membership.last_word, too_few=True)

    def _tell_end(self, why: str, *members: int) -> None:
        code = 0 if self.membership.finished else self.exit_code
        end = {"kind": "end", "why": why, "exit_code": code, "too_few": self._too_few}
        self._tell(end, *members)

    def _tell(self, message: Message, *members: int) -> None:
        self._door.send(message, *members)
