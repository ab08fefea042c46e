"""The server of the membership: one thread of the process that started the ranks, and that outlives
all of them.

It holds one connection to each rank, the `Membership` and the store of the current view. It needs
no torch, and is never a rank: memory and time that a training takes, or its death, do not touch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_ring.errors import RingError
from lightning_ring.job.watch.messages import Message
from lightning_ring.membership.agreement import Report
from lightning_ring.membership.connections import Connections
from lightning_ring.membership.key_value import KeyValue
from lightning_ring.membership.membership import Membership
from lightning_ring.membership.silence import Silence, SilenceLimits

_PING_SECONDS = 1.0
_LEAVING_SECONDS = 2.0  # between the end of a connection and that of its process
_MISFIT = "it does not fit the others"


class Steward:
    """Serves the members of ``membership`` on ``host``. `step` does everything; it is called again
    and again.

    ``kill(member, why, seconds)`` ends a process that has not ended by itself after ``seconds``. It
    is called for every member that is removed, since a process that is only slow, or cut off, must
    not write any more; `gone` has to follow. ``idle`` is that of `Silence`. Not thread-safe.

    Attributes:
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
    ) -> None:
        self.membership = membership
        self.ended: str | None = None
        self.exit_code = 1
        self.last_words: dict[int, str] = {}
        self.turned_away: set[int] = set()
        self._kill = kill
        self._too_few = False  # ranks, for too long: why the job is over
        self._store = KeyValue()
        self._silence = Silence(silence or SilenceLimits(), idle)
        self._connections = Connections(self, lambda member: self.membership.knows(member), host)
        self._told_to_stop = True
        self._told_of_newcomers = False
        self._why = ""
        self._next_ping = 0.0

    @property
    def port(self) -> int:
        return self._connections.port

    @property
    def pids(self) -> dict[int, int]:
        """Of the processes that have connected, as they say themselves."""
        return self._connections.pids

    def variables(self, member: int, host: str | None = None) -> dict[str, str]:
        """The environment variables by which process ``member`` finds the steward (`Member`), at
        address ``host``.
        """
        return self._connections.variables(member, host)

    def step(self, timeout: float) -> None:
        """Serve what has arrived, and wait up to ``timeout`` seconds for more."""
        self._connections.serve(timeout)
        if self.ended is None:
            self._look_for_silence(time.monotonic())
        self._advance()

    def expect(self, member: int) -> None:
        """Process ``member`` was started."""
        self.membership.expect(member)

    def gone(self, member: int, why: str) -> None:
        """Process ``member`` was seen to be dead, or on its way out of the kernel."""
        self._remove(member, why)
        self.membership.fenced(member)
        self._advance()

    def end(self, why: str, *, exit_code: int = 1, too_few: bool = False) -> None:
        """Tell everybody that the job is over: members leave, and where there are ``too_few``
        save what they have.
        """
        if self.ended is None:
            self.ended, self.exit_code, self._too_few = why, exit_code, too_few
            self._store.close(why)
            membership = self.membership
            for member in [*membership.members, *membership.newcomers]:
                self._tell_end(member, why)

    def end_with_too_few(self, why: str) -> None:
        """As `end` with ``too_few``; but ranks that each have a part of the state get a last
        view first, to save it.
        """
        if self.membership.end_with_last_view(why):
            self._advance()
        else:
            self.end(why, too_few=True)

    def close(self) -> None:
        self._connections.close()

    # -- called by the connections

    def take(self, member: int, message: Message) -> None:
        """``member`` has sent ``message``."""
        self._silence.heard(member)
        kind = message["kind"]
        if kind == "hello":
            self._tell(member, {"kind": "standing", "first_ranks": self.membership.first_ranks})
        elif kind == "report":
            standing = {name: message[name] for name in Report.__dataclass_fields__}
            self.membership.report(member, message["generation"], Report(**standing))
            self._why = self._why or (
                "newcomers wait" if self.membership.newcomers else f"process {member} connects anew"
            )
            if self.ended is not None:
                self._tell_end(member, self.ended)
        elif kind == "store":
            self._serve(member, message)
        elif kind == "finished":
            self.membership.finish(member)
            self._tell(member, {"kind": "noted"})
            for other in self.membership.members:
                self._tell(other, {"kind": "finisher"})
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
                # follows from that death, which the launcher is to report
                self.last_words[member] = message["text"]
            else:
                self.end(message["text"], exit_code=message["exit_code"])

    def hung_up(self, member: int) -> None:
        """The connection of ``member`` has ended."""
        self._silence.forget(member)
        self._remove(member, "its connection ended")

    # -- what follows

    def _look_for_silence(self, now: float) -> None:
        if now >= self._next_ping:
            self._next_ping = now + _PING_SECONDS
            for member in self._connections.members:
                self._tell(member, {"kind": "ping"})
        for member, why in self._silence.look(now, self.membership).items():
            self._remove(member, why, 0.0)

    def _serve(self, member: int, message: Message) -> None:
        number, view = message["number"], self.membership.view

        def answer(result: dict[str, Any]) -> None:
            self._tell(member, {"kind": "answer", "number": number, **result})

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
            self._connections.hang_up(member)  # it ends by itself where nobody can kill it

    def _turn_away(self, newcomer: int) -> None:
        if not self.membership.was_member(newcomer) and newcomer not in self.turned_away:
            self.turned_away.add(newcomer)
            self.last_words[newcomer] = _MISFIT
            self._tell_end(newcomer, f"for process {newcomer}, which does not fit the others")
            self._remove(newcomer, _MISFIT)

    def _advance(self) -> None:
        """Whatever follows from the state of the membership."""
        if self.ended is not None:
            return
        view = self.membership.view
        if self.membership.stopping and not self._told_to_stop and view is not None:
            self._told_to_stop = True
            self._store.close(f"generation {view.generation} is over ({self._why})")
            for member in self.membership.members:
                self._tell(
                    member, {"kind": "stop", "generation": view.generation, "why": self._why}
                )
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
        elif self.membership.last_word:
            self.end(self.membership.last_word, too_few=True)

    def _tell_end(self, member: int, why: str) -> None:
        code = 0 if self.membership.finished else self.exit_code
        self._tell(member, {"kind": "end", "why": why, "exit_code": code, "too_few": self._too_few})

    def _tell(self, member: int, message: Message) -> None:
        self._connections.tell(member, message)
