"""The stall report: when a collective is late, rank 0 asks all ranks where they are and says it in one message.

Questions and answers go over the job watch, whose threads answer while the main thread is busy, and use no collective.
Its relay is in rank 0, so rank 0 is the lowest rank that answers whenever any rank can be asked at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from torch.distributed import Store

from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.errors import CollectiveError
from lightning_ring.job.stalls.deputy import Deputy
from lightning_ring.job.stalls.rank_status import Place, longest_wait, own_place, silence_of, stall_lines
from lightning_ring.job.watch.messages import Message
from lightning_ring.job.watch.watch import JobWatch

RELAY_SECONDS = 2.0  # rank 0 passes a message on in milliseconds, unless its process is stopped or stuck in C
ANSWER_SECONDS = 2.0  # as long again for all ranks to answer: whoever takes longer is silent
VERDICT_SECONDS = RELAY_SECONDS + ANSWER_SECONDS + 0.5  # under `STUCK_SECONDS`, when a second thread loses patience
QUIET_SHARE = 0.75  # of the time until the next report is due: notices of the same stall come a little early or late

_LATE, _ASK, _PLACE, _VERDICT = "stall", "stall ask", "stall place", "stall verdict"  # over the watch
_CALL = "stall call"  # to the deputy

Found = tuple[list[str], float, list[Message]]
"""The lines of a report, for how many seconds a rank has waited at most, and what else was heard meanwhile."""

_log = logging.getLogger("lightning_ring")


class StallReporter:
    """One a process; building one is collective. A daemon thread of its own asks, answers and logs.

    The watch's thread could not: a logging handler whose stream is blocked holds its lock, and reading a source line
    may touch a file system that hangs; deaths have to be noticed meanwhile. Collectives cost nothing more: who waits
    already looks every 20 ms whether to go on, and hands over a note once it is late.
    """

    def __init__(self, watch: JobWatch, store: Store) -> None:
        self._watch = watch
        self._rank = watch.info.rank
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._patience = WaitPolicy()
        self._number = 0  # of the communicator: a verdict on one says nothing about the next
        self._progress: Callable[[], Callable[[], str] | None] = lambda: None
        self._decided = threading.Event()
        self._reported_at = float("-inf")
        self._num_reports = 0
        self._num_asked = 0
        self._verdicts: set[int] = set()  # communicators that have theirs
        self._deputy = Deputy(watch.info, store, watch.address, self._events.put)
        watch.on_event(self._hear)
        threading.Thread(target=self._run, name="ring-stall", daemon=True).start()

    # -- from the main thread

    def follow(self, patience: WaitPolicy, number: int) -> None:
        """Report on what waits with ``patience``: that of the ``number``-th communicator, on every rank."""
        self._decided.clear()
        self._patience, self._number = patience, number
        patience.stalls = self

    def tell_progress(self, progress: Callable[[], str]) -> None:
        """``progress``, a method, says how far training is; called from another thread. Its object is not kept."""
        self._progress = weakref.WeakMethod(progress)

    # -- from threads that wait

    def notice(self, description: str, seconds: float) -> None:
        self._events.put({"kind": "", "collective": description, "waited": seconds})

    def verdict(self, description: str, late: str, advice: str) -> str:
        self._events.put({"kind": "", "collective": description, "waited": 0.0, "late": late, "advice": advice})
        if self._decided.wait(VERDICT_SECONDS) and self._patience.verdict is not None:
            return str(self._patience.verdict)
        rank_0 = self._watch.rank_0
        who = f"rank 0 (host {rank_0['host']}, pid {rank_0['pid']})"
        return f"{late}.\n  {who} is silent: {silence_of(rank_0['pid'])}.\n{advice}"

    # -- from the watch's thread

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind in (_LATE, _PLACE):
            if self._rank == 0:
                self._events.put(message)
        elif kind == _ASK:
            if self._rank != 0:
                self._events.put(message)
        elif kind == _VERDICT and message.get("number") == self._number:
            # here and not in the other thread: it comes before the news that a rank failed of it
            self._patience.end(CollectiveError(str(message.get("text"))))
            self._decided.set()

    # -- in its own thread

    def _run(self) -> None:
        while True:
            event = self._events.get()
            try:
                self._handle(event)
            except Exception:
                _log.warning("The stall report failed; training goes on.", exc_info=True)

    def _handle(self, event: Message) -> None:
        kind = event["kind"]
        if kind == _ASK:
            self._watch.tell({"kind": _PLACE, "to": 0, "question": event["question"]} | self._own_place().message())
        elif kind == _LATE:
            self._answer_late(event)
        elif kind == _CALL:
            self._report(event, self._hear_out)
        elif not kind:
            self._tell_rank_0(event, self._own_place())
        # what is left is an answer that came too late

    def _tell_rank_0(self, event: Message, place: Place) -> None:
        """In the rank that waits, unless it has gone on meanwhile."""
        if place.collective:  # of several communicators, one inside the other, the same one on all ranks
            event |= {"collective": place.collective, "waited": place.seconds}
        if "late" not in event and not self._warning() <= place.seconds < self._patience.seconds:
            return  # it began another one, or ends with a verdict
        if not self._watch.tell(event | {"kind": _LATE, "to": 0, "number": self._number}, RELAY_SECONDS):
            self._do_without_rank_0(event)

    def _answer_late(self, late: Message) -> None:
        """In rank 0, when a rank says that a collective is late."""
        if "late" not in late:
            self._report(late, self._ask_all)
        elif (number := late["number"]) not in self._verdicts:  # else it is on its way to all ranks
            self._verdicts.add(number)
            lines, _, meanwhile = self._ask_all(late)
            text = "\n  ".join([f"{late['late']}.", *lines]) + f"\n{late['advice']}"
            self._watch.tell({"kind": _VERDICT, "number": number, "text": text})
            self._handle_all(meanwhile)

    def _do_without_rank_0(self, event: Message) -> None:
        if "late" in event:
            self._decided.set()  # without a verdict: `verdict` says the same on every rank
        elif self._rank == 1:
            self._report(event, self._hear_out)
        elif not self._deputy.call(event | {"kind": _CALL} | self._home() | self._own_place().message()):
            # who else waits cannot be known: each says so itself
            self._report(event, self._speak_alone)

    def _report(self, late: Message, find: Callable[[Message], Found]) -> None:
        now = time.monotonic()
        if now - late["waited"] > self._reported_at:  # it began after the last report: another stall
            self._num_reports = 0
        elif now - self._reported_at < QUIET_SHARE * self._warning() * 2**self._num_reports:
            return
        lines, waited, meanwhile = find(late)
        if waited >= late["waited"]:  # else it is over, and this rank, stopped for a while, hears of it late
            self._reported_at = now
            self._num_reports += 1
            head = f"{late['collective']} has waited {waited:.0f} s; it fails after {self._patience.seconds:g} s."
            _log.warning("%s", "\n  ".join([head, *lines]))
        self._handle_all(meanwhile)

    def _ask_all(self, late: Message) -> Found:
        """In rank 0."""
        self._num_asked += 1
        self._watch.tell({"kind": _ASK, "question": self._num_asked})
        homes = self._watch.peers()
        places, meanwhile = {0: self._own_place()}, []
        for event in self._events_until(time.monotonic() + ANSWER_SECONDS, lambda: homes.keys() <= places.keys()):
            if event["kind"] != _PLACE:
                meanwhile.append(event)
            elif event["question"] == self._num_asked:
                places[event["rank"]] = Place.of_message(event)
        lines = stall_lines(late["collective"], places, homes)
        if gone := [rank for rank in range(self._watch.info.world_size) if rank not in homes]:
            lines.append(f"{ranks_text(gone)} left the job.")
        return lines, longest_wait(places, late["collective"]), meanwhile

    def _hear_out(self, late: Message) -> Found:
        """In rank 1, which the others call when they find rank 0 silent: those that wait, and they only."""
        homes: dict[int, Message] = {0: self._watch.rank_0, 1: self._home()}
        places, meanwhile = {1: self._own_place()}, []
        world_size = self._watch.info.world_size

        def hear(event: Message) -> None:
            homes[event["rank"]], places[event["rank"]] = event, Place.of_message(event)

        if late["kind"] == _CALL:
            hear(late)
        for event in self._events_until(time.monotonic() + ANSWER_SECONDS, lambda: len(homes) == world_size):
            hear(event) if event["kind"] == _CALL else meanwhile.append(event)
        lines = stall_lines(late["collective"], places, homes)
        if unheard := [rank for rank in range(world_size) if rank not in homes]:
            lines.append(f"{ranks_text(unheard)} did not call: without rank 0 only ranks that wait are heard.")
        return lines, longest_wait(places, late["collective"]), meanwhile

    def _speak_alone(self, late: Message) -> Found:
        places = {self._rank: self._own_place()}
        lines = stall_lines(late["collective"], places, {0: self._watch.rank_0})
        lines.append("Without ranks 0 and 1 the others cannot be asked: each that waits reports itself.")
        return lines, longest_wait(places, late["collective"]), []

    def _events_until(self, until: float, enough: Callable[[], bool]) -> Iterator[Message]:
        while not enough() and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                yield self._events.get(timeout=left)

    def _handle_all(self, events: Sequence[Message]) -> None:
        for event in events:
            self._handle(event)

    def _own_place(self) -> Place:
        return own_place(self._patience, self._progress() or (lambda: ""))

    def _home(self) -> Message:
        return {"rank": self._rank, "host": os.uname().nodename, "pid": os.getpid()}

    def _warning(self) -> float:
        warning = self._patience.stall_warning
        return warning.total_seconds() if warning is not None else 0.0
