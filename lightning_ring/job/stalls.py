"""The stall report: when a collective is late, rank 0 asks all ranks for their status and logs one
message.

The job watch carries questions and answers; its threads answer while the main thread is busy. Its
relay is in rank 0: when rank 0 is silent, each rank that waits reports itself.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from lightning_ring.comm.late_calls import LateCalls
from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.errors import CollectiveError
from lightning_ring.job.watch.messages import Message
from lightning_ring.job.watch.watch import JobWatch

# rank 0 passes a message on in milliseconds, unless its process is stopped or stuck in C
RELAY_SECONDS = 2.0
ANSWER_SECONDS = 2.0  # as long again for all ranks to answer; slower ones count as silent
# under `STUCK_SECONDS`, when a second thread loses policy
VERDICT_SECONDS = RELAY_SECONDS + ANSWER_SECONDS + 0.5
# A share of the time to the next report: notices come a little early or late.
QUIET_SHARE = 0.75
NUM_FRAMES = 8
SHOWN_STACKS = 4  # different ones; ranks with the same stack share it
SHOWN_WAITING = 10  # different collectives or steps

_LATE, _ASK, _STATUS, _VERDICT = "stall", "stall ask", "stall status", "stall verdict"
_CLOSE = "stall close"  # from this rank
_CALL = "late call"

State = TypeVar("State", bound=Hashable)
_log = logging.getLogger("lightning_ring")


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of one rank."""

    # that it has called and not finished; empty if none: the others wait for this rank
    collective: str = ""
    seconds: float = 0.0  # for which it has waited in that
    last: str = ""  # the collective that it finished last
    progress: str = ""  # of training
    stack: str = ""  # `main_stack`


def own_status(policy: WaitPolicy, progress: Callable[[], str]) -> RankStatus:
    """The status of this rank, from any thread, without locks that the main thread could hold."""
    engines = [engine for reference in policy.engines if (engine := reference()) is not None]
    under_way = [pair for engine in engines if (pair := engine.under_way()) is not None]
    going_on = {text for text, _ in under_way}  # after a thread that started it has done with it
    ended = [pair for engine in engines if (pair := engine.last) and pair[0] not in going_on]
    text, now = "", time.monotonic()
    with contextlib.suppress(Exception):  # it reads what the main thread is changing
        text = progress()
    collective, since = min(under_way, key=lambda pair: pair[1], default=("", now))
    last, _ = max(ended, key=lambda pair: pair[1], default=("", now))
    return RankStatus(collective, now - since, last, text, main_stack())


def main_stack() -> str:
    """A line ``file:line function: source`` for each innermost call of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=NUM_FRAMES)
    lines = []
    for call in calls:
        path = call.filename.rpartition("/site-packages/")[2]
        lines.append(f"\n      {path}:{call.lineno} {call.name}: {call.line}"[:200])
    return "".join(lines)


def stall_lines(
    collective: str, statuses: Mapping[int, RankStatus], processes: Mapping[int, Message]
) -> list[str]:
    """The lines of the report on a late ``collective``, the cause first.

    Args:
        collective: The late collective; ranks that wait in another one are shown apart.
        statuses: The ranks that answered.
        processes: ``host`` and ``pid`` of the ranks that were asked. Those without a status are
            silent.
    """
    away = {rank: status for rank, status in statuses.items() if not status.collective}
    waiting = {rank: status for rank, status in statuses.items() if status.collective}
    lines = _away_lines(away, processes)
    if silent := sorted(processes.keys() - statuses.keys()):
        lines.append(
            f"{_named(silent, processes)} {_are(silent)} silent: it is stopped (SIGSTOP, a "
            "debugger), its host swaps, or C code holds its interpreter. "
            f"`py-spy dump --native --pid {processes[silent[0]]['pid']}` there shows where."
        )
    groups = _alike({rank: (each.collective, each.progress) for rank, each in waiting.items()})
    for (name, progress), ranks in groups[:SHOWN_WAITING]:
        verb = "wait" if len(ranks) > 1 else "waits"
        which = "it" if name == collective else name
        lines.append(f"{ranks_text(ranks)} {verb} in {which}{_after(progress)}.")
    if rest := sum(len(ranks) for _, ranks in groups[SHOWN_WAITING:]):
        lines.append(f"{rest} more wait, at other steps or in other collectives.")
    if not away and not silent:
        lines.append(
            "All ranks answer, and each is in a collective: the network is slow, or "
            "they wait for each other."
        )
        stacks = _alike({rank: status.stack for rank, status in waiting.items()})
        for stack, ranks in stacks[:SHOWN_STACKS]:
            lines.append(f"The main thread of {ranks_text(ranks)}:{stack}")
    return lines


def _away_lines(away: Mapping[int, RankStatus], processes: Mapping[int, Message]) -> list[str]:
    lines: list[str] = []
    groups = _alike(away)
    for status, ranks in groups[:SHOWN_STACKS]:
        they = "they" if len(ranks) > 1 else "it"
        last = f"; the last that {they} finished was {status.last}" if status.last else ""
        lines.append(
            f"{_named(ranks, processes)} {_are(ranks)} not in it{_after(status.progress)}{last}. "
            f"The main thread, innermost call first:{status.stack}"
        )
    if rest := [rank for _, ranks in groups[SHOWN_STACKS:] for rank in ranks]:
        lines.append(f"{ranks_text(rest)} {_are(rest)} not in it either, at other places.")
    return lines


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _after(progress: str) -> str:
    return progress and f", {progress}"


def _alike(states: Mapping[int, State]) -> list[tuple[State, list[int]]]:
    ranks: dict[State, list[int]] = {}
    for rank in sorted(states):
        ranks.setdefault(states[rank], []).append(rank)
    return list(ranks.items())


def _named(ranks: Sequence[int], processes: Mapping[int, Message]) -> str:
    hosts = sorted({processes[rank]["host"] for rank in ranks})
    if len(ranks) == 1:
        return f"{ranks_text(ranks)} (host {hosts[0]}, pid {processes[ranks[0]]['pid']})"
    plural, more = "s" * (len(hosts) > 1), ", …" * (len(hosts) > 10)
    return f"{ranks_text(ranks)} (host{plural} {', '.join(hosts[:10])}{more})"


class StallReporter:
    """One in each rank, with a daemon thread of its own: a logging handler or a source file may
    block, and the watch's thread has to notice deaths meanwhile.

    A wait asks every 20 ms whether to go on, and queues a message once it is late.
    """

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._rank = watch.info.rank
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._patience = WaitPolicy()
        self._warning = 0.0  # seconds
        self.late_calls: LateCalls | None = None  # of the communicator that is followed
        self._number = 0  # of the communicator: a verdict on one says nothing about the next
        self._progress: Callable[[], Callable[[], str] | None] = lambda: None
        self._decided = threading.Event()
        self._reported_at = float("-inf")
        self._num_reports = 0
        self._num_asked = 0
        self._verdicts: set[int] = set()  # communicators that have theirs
        watch.on_event(self._hear)
        self._thread = threading.Thread(target=self._run, name="ring-stall", daemon=True)
        self._thread.start()

    # -- from the main thread

    def follow(self, policy: WaitPolicy, number: int) -> None:
        """Report on waits with ``policy``, that of the ``number``-th communicator."""
        self._decided.clear()
        self._patience, self._number = policy, number
        self._warning = (policy.stall_warning or timedelta()).total_seconds()
        self.late_calls = LateCalls(self._rank, policy, self._tell_call)
        policy.stalls = self

    def tell_progress(self, progress: Callable[[], str]) -> None:
        """Report ``progress``, a method, which another thread calls. Its object is not kept."""
        self._progress = weakref.WeakMethod(progress)

    def close(self) -> None:
        self._events.put({"kind": _CLOSE})
        self._thread.join(timeout=1)  # it may be writing to a stream that blocks

    # -- from threads that wait

    def notice(self, description: str, seconds: float) -> None:
        self._events.put({"kind": "", "collective": description, "waited": seconds})

    def _tell_call(self, call: int, what: str) -> None:
        event = {"kind": _CALL, "to": 1 - self._rank, "number": self._number}
        self._events.put(event | {"call": call, "what": what})

    def verdict(self, description: str, late: str, advice: str) -> str:
        self._events.put(
            {"kind": "", "collective": description, "waited": 0.0, "late": late, "advice": advice}
        )
        if self._decided.wait(VERDICT_SECONDS) and self._patience.verdict is not None:
            return str(self._patience.verdict)
        (silence,) = stall_lines(description, {}, {0: self._watch.rank_0})
        return f"{late}.\n  {silence}\n{advice}"

    # -- from the watch's thread

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind in (_LATE, _STATUS, _ASK):
            self._events.put(message)
        elif kind == _VERDICT and message["number"] == self._number:
            # Here, because it comes before the news that a rank failed of it.
            self._patience.end(CollectiveError(message["text"]))
            self._decided.set()
        elif kind == _CALL and message["number"] == self._number and self.late_calls:
            self.late_calls.hear(message["call"], message["what"])

    # -- in its own thread

    def _run(self) -> None:
        while (event := self._events.get())["kind"] != _CLOSE:
            try:
                self._handle(event)
            except Exception:
                _log.warning("The stall report failed; training goes on.", exc_info=True)

    def _handle(self, event: Message) -> None:
        kind = event["kind"]
        if kind == _ASK:
            answer = {"kind": _STATUS, "to": 0, "question": event["question"]}
            self._watch.tell(answer | {"status": asdict(self._own_status())})
        elif kind == _LATE and "late" in event:
            self._send_verdict(event)
        elif kind == _LATE:
            self._report(event)
        elif kind == _CALL:
            self._watch.tell(event)
        elif not kind:
            self._tell_rank_0(event)

    def _tell_rank_0(self, event: Message) -> None:
        status = self._own_status()
        # Of nested communicators, the same one on all ranks.
        if status.collective:
            event |= {"collective": status.collective, "waited": status.seconds}
        timed_out = "late" in event
        # it began another one, or ends with a verdict
        if not timed_out and not self._warning <= status.seconds < self._patience.seconds:
            return
        event |= {"kind": _LATE, "to": 0, "number": self._number}
        if not self._watch.tell(event, RELAY_SECONDS):
            if timed_out:
                # without a verdict: `verdict` gives the same text on every rank
                self._decided.set()
            else:
                self._report(event)

    def _send_verdict(self, late: Message) -> None:
        """In rank 0, once for a communicator."""
        number = late["number"]
        if number in self._verdicts:
            return
        self._verdicts.add(number)
        lines, _ = self._ask_all(late["collective"])
        text = "\n  ".join([f"{late['late']}.", *lines]) + f"\n{late['advice']}"
        self._watch.tell({"kind": _VERDICT, "number": number, "text": text})

    def _report(self, late: Message) -> None:
        """In rank 0, or in a rank that waits while rank 0 is silent."""
        now, collective = time.monotonic(), late["collective"]
        # it began after the last report: another stall
        if now - late["waited"] > self._reported_at:
            self._num_reports = 0
        elif now - self._reported_at < QUIET_SHARE * self._warning * 2**self._num_reports:
            return
        lines, statuses = self._ask_all(collective)
        waits = [each.seconds for each in statuses.values() if each.collective == collective]
        waited = max(waits, default=0.0)
        # Else this rank, stopped for a while, hears of it late.
        if waited >= late["waited"]:
            self._reported_at = now
            self._num_reports += 1
            head = (
                f"{collective} has waited {waited:.0f} s; it fails after "
                f"{self._patience.seconds:g} s."
            )
            _log.warning("%s", "\n  ".join([head, *lines]))

    def _ask_all(self, collective: str) -> tuple[list[str], dict[int, RankStatus]]:
        """The lines of a report and the ranks' answers."""
        statuses = {self._rank: self._own_status()}
        if self._rank:
            if not statuses[self._rank].collective:
                return [], statuses
            lines = stall_lines(collective, statuses, {0: self._watch.rank_0})
            lines.append(
                "Without rank 0 the other ranks cannot be asked: each one that waits reports "
                "itself."
            )
            return lines, statuses
        self._num_asked += 1
        self._watch.tell({"kind": _ASK, "question": self._num_asked})
        processes = {0: self._watch.rank_0} | self._watch.peers()
        meanwhile: list[Message] = []
        until = time.monotonic() + ANSWER_SECONDS
        while processes.keys() - statuses.keys() and (left := until - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except Empty:
                break
            if event["kind"] != _STATUS:
                meanwhile.append(event)
            elif event["question"] == self._num_asked and event["rank"] in processes:
                statuses[event["rank"]] = RankStatus(**event["status"])
        for event in meanwhile:
            self._events.put(event)
        lines = stall_lines(collective, statuses, processes)
        if gone := [rank for rank in range(self._watch.info.world_size) if rank not in processes]:
            lines.append(f"{ranks_text(gone)} left the job.")
        return lines, statuses

    def _own_status(self) -> RankStatus:
        return own_status(self._patience, self._progress() or str)
