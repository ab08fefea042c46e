"""The stall report: when a collective is late, rank 0 asks all ranks for their status and logs one
message.

Questions and answers go over the job watch, whose threads answer while the main thread is busy, and
use no collective. Its relay is in rank 0: when rank 0 is silent no rank can be asked, and each rank
that waits reports itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.errors import CollectiveError
from lightning_ring.job.stalls.rank_status import (
    RankStatus,
    longest_wait,
    own_status,
    silence_of,
    stall_lines,
)
from lightning_ring.job.watch.messages import Message
from lightning_ring.job.watch.watch import JobWatch

# rank 0 passes a message on in milliseconds, unless its process is stopped or stuck in C
RELAY_SECONDS = 2.0
ANSWER_SECONDS = 2.0  # as long again for all ranks to answer; slower ones count as silent
# under `STUCK_SECONDS`, when a second thread loses policy
VERDICT_SECONDS = RELAY_SECONDS + ANSWER_SECONDS + 0.5
# of the time until the next report is due: notices of the same stall come a little early or late
QUIET_SHARE = 0.75

# messages of the watch
_LATE, _ASK, _STATUS, _VERDICT = "stall", "stall ask", "stall status", "stall verdict"
_CLOSE = "stall close"

Found = tuple[list[str], float, list[Message]]
"""The lines of a report, the longest wait of a rank in seconds, and other messages that came."""

_log = logging.getLogger("lightning_ring")


class StallReporter:
    """One in each rank. A daemon thread of its own asks, answers and logs.

    The watch's thread could not: a logging handler whose stream is blocked holds its lock, and
    reading a source line may touch a file system that hangs; deaths have to be noticed meanwhile.
    Collectives cost nothing more: a wait asks every 20 ms whether to go on, and puts a message into
    the queue once it is late.
    """

    def __init__(self, watch: JobWatch) -> None:
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
        self._closed = False
        watch.on_event(self._hear)
        self._thread = threading.Thread(target=self._run, name="ring-stall", daemon=True)
        self._thread.start()

    # -- from the main thread

    def follow(self, policy: WaitPolicy, number: int) -> None:
        """Report on waits with ``policy``, that of the ``number``-th communicator."""
        self._decided.clear()
        self._patience, self._number = policy, number
        policy.stalls = self

    def tell_progress(self, progress: Callable[[], str]) -> None:
        """Report ``progress``, a method, which is called from another thread. Its object is not
        kept.
        """
        self._progress = weakref.WeakMethod(progress)

    def close(self) -> None:
        self._closed = True
        self._events.put({"kind": _CLOSE})  # wakes it
        self._thread.join(timeout=1)  # it may be writing to a stream that blocks

    # -- from threads that wait

    def notice(self, description: str, seconds: float) -> None:
        self._events.put({"kind": "", "collective": description, "waited": seconds})

    def verdict(self, description: str, late: str, advice: str) -> str:
        self._events.put(
            {"kind": "", "collective": description, "waited": 0.0, "late": late, "advice": advice}
        )
        if self._decided.wait(VERDICT_SECONDS) and self._patience.verdict is not None:
            return str(self._patience.verdict)
        rank_0 = self._watch.rank_0
        name = f"rank 0 (host {rank_0['host']}, pid {rank_0['pid']})"
        return f"{late}.\n  {name} is silent: {silence_of(rank_0['pid'])}.\n{advice}"

    # -- from the watch's thread

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind in ((_LATE, _STATUS) if self._rank == 0 else (_ASK,)):
            self._events.put(message)
        elif kind == _VERDICT and message.get("number") == self._number:
            # here and not in the other thread: it comes before the news that a rank failed of it
            self._patience.end(CollectiveError(str(message.get("text"))))
            self._decided.set()

    # -- in its own thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._handle(self._events.get())
            except Exception:
                _log.warning("The stall report failed; training goes on.", exc_info=True)

    def _handle(self, event: Message) -> None:
        kind = event["kind"]
        if kind == _ASK:
            self._watch.tell(
                {"kind": _STATUS, "to": 0, "question": event["question"]}
                | self._own_status().message()
            )
        elif kind == _LATE:
            self._answer_late(event)
        elif not kind:
            self._tell_rank_0(event, self._own_status())
        # else: closed, or an answer that came too late

    def _tell_rank_0(self, event: Message, status: RankStatus) -> None:
        """In the rank that waits, unless it has gone on meanwhile."""
        # of several communicators, one inside the other, the same one on all ranks
        if status.collective:
            event |= {"collective": status.collective, "waited": status.seconds}
        if "late" not in event and not self._warning() <= status.seconds < self._patience.seconds:
            return  # it began another one, or ends with a verdict
        if not self._watch.tell(
            event | {"kind": _LATE, "to": 0, "number": self._number}, RELAY_SECONDS
        ):
            if "late" in event:
                # without a verdict: `verdict` gives the same text on every rank
                self._decided.set()
            else:
                self._report(event, self._report_alone)

    def _answer_late(self, late: Message) -> None:
        """In rank 0, when a rank says that a collective is late."""
        if "late" not in late:
            self._report(late, self._ask_all)
        elif (number := late["number"]) not in self._verdicts:  # else it is on its way to all ranks
            self._verdicts.add(number)
            lines, _, meanwhile = self._ask_all(late)
            text = "\n  ".join([f"{late['late']}.", *lines]) + f"\n{late['advice']}"
            self._watch.tell({"kind": _VERDICT, "number": number, "text": text})
            for event in meanwhile:
                self._handle(event)

    def _report(self, late: Message, find: Callable[[Message], Found]) -> None:
        now = time.monotonic()
        # it began after the last report: another stall
        if now - late["waited"] > self._reported_at:
            self._num_reports = 0
        elif now - self._reported_at < QUIET_SHARE * self._warning() * 2**self._num_reports:
            return
        lines, waited, meanwhile = find(late)
        # else it is over, and this rank, stopped for a while, hears of it late
        if waited >= late["waited"]:
            self._reported_at = now
            self._num_reports += 1
            head = (
                f"{late['collective']} has waited {waited:.0f} s; it fails after "
                f"{self._patience.seconds:g} s."
            )
            _log.warning("%s", "\n  ".join([head, *lines]))
        for event in meanwhile:
            self._handle(event)

    def _ask_all(self, late: Message) -> Found:
        """In rank 0."""
        self._num_asked += 1
        self._watch.tell({"kind": _ASK, "question": self._num_asked})
        processes = self._watch.peers()
        statuses, meanwhile = {0: self._own_status()}, []
        for event in self._events_until(
            time.monotonic() + ANSWER_SECONDS, lambda: processes.keys() <= statuses.keys()
        ):
            if event["kind"] != _STATUS:
                meanwhile.append(event)
            elif event["question"] == self._num_asked:
                statuses[event["rank"]] = RankStatus.of_message(event)
        lines = stall_lines(late["collective"], statuses, processes)
        if gone := [rank for rank in range(self._watch.info.world_size) if rank not in processes]:
            lines.append(f"{ranks_text(gone)} left the job.")
        return lines, longest_wait(statuses, late["collective"]), meanwhile

    def _report_alone(self, late: Message) -> Found:
        statuses = {self._rank: self._own_status()}
        lines = stall_lines(late["collective"], statuses, {0: self._watch.rank_0})
        lines.append(
            "Without rank 0 the other ranks cannot be asked: each one that waits reports itself."
        )
        return lines, longest_wait(statuses, late["collective"]), []

    def _events_until(self, until: float, enough: Callable[[], bool]) -> Iterator[Message]:
        while not enough() and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                yield self._events.get(timeout=left)

    def _own_status(self) -> RankStatus:
        return own_status(self._patience, self._progress() or (lambda: ""))

    def _warning(self) -> float:
        warning = self._patience.stall_warning
        return warning.total_seconds() if warning is not None else 0.0
