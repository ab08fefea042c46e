"""The stall report: when a collective is late, rank 0 asks all ranks for their status and logs one
message.

Questions and answers go over the job watch, whose threads answer while the main thread is busy, and
use no collective. Its relay is in rank 0: when rank 0 is silent no rank can be asked, and each rank
that waits reports itself.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
# of the time until the next report is due: notices of the same stall come a little early or late
QUIET_SHARE = 0.75
NUM_FRAMES = 8
SHOWN_STACKS = 4  # different ones; ranks with the same stack share it
SHOWN_WAITING = 10  # different collectives or steps

# messages of the watch
_LATE, _ASK, _STATUS, _VERDICT = "stall", "stall ask", "stall status", "stall verdict"
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
    stack: tuple[str, ...] = ()  # its main thread's calls, innermost first


def own_status(policy: WaitPolicy, progress: Callable[[], str]) -> RankStatus:
    """The status of this rank, from any thread. It takes no lock that the main thread could
    hold.
    """
    engines = [engine for reference in policy.engines if (engine := reference()) is not None]
    under_way = [pair for engine in engines if (pair := engine.under_way()) is not None]
    going_on = {text for text, _ in under_way}  # after a thread that started it has done with it
    lasts = [pair for engine in engines if (pair := engine.last) is not None]
    ended = [pair for pair in lasts if pair[0] not in going_on]
    text, now = "", time.monotonic()
    with contextlib.suppress(Exception):  # it reads what the main thread is changing
        text = progress()
    collective, since = min(under_way, key=lambda pair: pair[1], default=("", now))
    last, _ = max(ended, key=lambda pair: pair[1], default=("", now))
    return RankStatus(collective, now - since, last, text, main_stack())


def main_stack() -> tuple[str, ...]:
    """``file:line function: source`` of the main thread's innermost calls, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < NUM_FRAMES:
        code, line = frame.f_code, frame.f_lineno
        source = linecache.getline(code.co_filename, line).strip()
        path = code.co_filename.rpartition("/site-packages/")[2]
        lines.append(f"{path}:{line} {code.co_name}: {source}"[:200])
        frame = frame.f_back
    return tuple(lines)


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
    silent = sorted(processes.keys() - statuses.keys())
    lines = _away_lines(away, processes)
    if silent:
        names = f"{_named(silent, processes)} {'are' if len(silent) > 1 else 'is'}"
        lines.append(f"{names} silent: {_silence_of(processes[silent[0]]['pid'])}.")
    lines += _waiting_lines(collective, waiting)
    if not away and not silent:
        lines.append(
            "All ranks answer, and each is in a collective: the network is slow, or "
            "they wait for each other."
        )
        stacks = _alike({rank: status.stack for rank, status in waiting.items()})
        for stack, ranks in stacks[:SHOWN_STACKS]:
            lines += [f"The main thread of {ranks_text(ranks)}:", *_indented(stack)]
    return lines


def _away_lines(away: Mapping[int, RankStatus], processes: Mapping[int, Message]) -> list[str]:
    lines: list[str] = []
    groups = _alike(away)
    for status, ranks in groups[:SHOWN_STACKS]:
        verb, they = ("are", "they") if len(ranks) > 1 else ("is", "it")
        last = f"; the last that {they} finished was {status.last}" if status.last else ""
        lines.append(
            f"{_named(ranks, processes)} {verb} not in it{_after(status.progress)}{last}. The main "
            "thread, innermost call first:"
        )
        lines += _indented(status.stack)
    if rest := [rank for _, ranks in groups[SHOWN_STACKS:] for rank in ranks]:
        verb = "are" if len(rest) > 1 else "is"
        lines.append(f"{ranks_text(rest)} {verb} not in it either, at other places.")
    return lines


def _waiting_lines(collective: str, waiting: Mapping[int, RankStatus]) -> list[str]:
    lines: list[str] = []
    groups = _alike({rank: (each.collective, each.progress) for rank, each in waiting.items()})
    for (name, progress), ranks in groups[:SHOWN_WAITING]:
        verb, which = "wait" if len(ranks) > 1 else "waits", "it" if name == collective else name
        lines.append(f"{ranks_text(ranks)} {verb} in {which}{_after(progress)}.")
    if rest := sum(len(ranks) for _, ranks in groups[SHOWN_WAITING:]):
        lines.append(f"{rest} more wait, at other steps or in other collectives.")
    return lines


def _after(progress: str) -> str:
    return progress and f", {progress}"


def _silence_of(pid: int) -> str:
    return (
        "it is stopped (SIGSTOP, a debugger), its host swaps, or C code holds its interpreter. "
        f"`py-spy dump --native --pid {pid}` there shows where"
    )


def _alike(states: Mapping[int, State]) -> list[tuple[State, list[int]]]:
    """Ranks of equal state together, in the order of their lowest rank."""
    ranks: dict[State, list[int]] = {}
    for rank in sorted(states):
        ranks.setdefault(states[rank], []).append(rank)
    return list(ranks.items())


def _named(ranks: Sequence[int], processes: Mapping[int, Message]) -> str:
    known = [processes.get(rank, {"host": "?", "pid": "?"}) for rank in ranks]
    hosts = sorted({process["host"] for process in known})
    if len(ranks) == 1:
        return f"{ranks_text(ranks)} (host {hosts[0]}, pid {known[0]['pid']})"
    more = ", …" if len(hosts) > 10 else ""
    return (
        f"{ranks_text(ranks)} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:10])}{more})"
    )


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


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
        self.late_calls: LateCalls | None = None  # of the communicator that is followed
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
        self.late_calls = LateCalls(self._rank, policy, self._tell_call)
        policy.stalls = self

    def tell_progress(self, progress: Callable[[], str]) -> None:
        """Report ``progress``, a method, which is called from another thread. Its object is not
        kept.
        """
        self._progress = weakref.WeakMethod(progress)

    def close(self) -> None:
        self._closed = True
        self._events.put({"kind": "stall close"})  # wakes it
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
        rank_0 = self._watch.rank_0
        return (
            f"{late}.\n  {_named([0], {0: rank_0})} is silent: {_silence_of(rank_0['pid'])}."
            f"\n{advice}"
        )

    # -- from the watch's thread

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind in ((_LATE, _STATUS) if self._rank == 0 else (_ASK,)):
            self._events.put(message)
        elif kind == _VERDICT and message.get("number") == self._number:
            # here and not in the other thread: it comes before the news that a rank failed of it
            self._patience.end(CollectiveError(str(message.get("text"))))
            self._decided.set()
        elif kind == _CALL and message.get("number") == self._number and self.late_calls:
            self.late_calls.hear(message["call"], message["what"])

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
            answer = {"kind": _STATUS, "to": 0, "question": event["question"]}
            self._watch.tell(answer | {"status": asdict(self._own_status())})
        elif kind == _LATE and "late" in event:
            self._send_verdict(event)
        elif kind == _LATE:
            self._report(event, alone=False)
        elif kind == _CALL:
            self._watch.tell(event)
        elif not kind:
            self._tell_rank_0(event, self._own_status())
        # else: closed, or an answer that came too late

    def _tell_rank_0(self, event: Message, status: RankStatus) -> None:
        """In the rank that waits, unless it has gone on meanwhile."""
        # of several communicators, one inside the other, the same one on all ranks
        if status.collective:
            event |= {"collective": status.collective, "waited": status.seconds}
        timed_out = "late" in event
        # it began another one, or ends with a verdict
        if not timed_out and not self._warning() <= status.seconds < self._patience.seconds:
            return
        event |= {"kind": _LATE, "to": 0, "number": self._number}
        if not self._watch.tell(event, RELAY_SECONDS):
            if timed_out:
                # without a verdict: `verdict` gives the same text on every rank
                self._decided.set()
            else:
                self._report(event, alone=True)

    def _send_verdict(self, late: Message) -> None:
        """In rank 0, once for a communicator, when a rank says that a collective is too late."""
        number = late["number"]
        if number in self._verdicts:
            return
        self._verdicts.add(number)
        lines, _, meanwhile = self._ask_all(late["collective"])
        text = "\n  ".join([f"{late['late']}.", *lines]) + f"\n{late['advice']}"
        self._watch.tell({"kind": _VERDICT, "number": number, "text": text})
        for event in meanwhile:
            self._handle(event)

    def _report(self, late: Message, *, alone: bool) -> None:
        """In rank 0, or in a rank that waits while rank 0 is silent."""
        now, collective = time.monotonic(), late["collective"]
        # it began after the last report: another stall
        if now - late["waited"] > self._reported_at:
            self._num_reports = 0
        elif now - self._reported_at < QUIET_SHARE * self._warning() * 2**self._num_reports:
            return
        meanwhile: list[Message] = []
        if alone:
            statuses = {self._rank: self._own_status()}
            lines = stall_lines(collective, statuses, {0: self._watch.rank_0})
            lines.append(
                "Without rank 0 the other ranks cannot be asked: each one that waits reports "
                "itself."
            )
        else:
            lines, statuses, meanwhile = self._ask_all(collective)
        waits = [each.seconds for each in statuses.values() if each.collective == collective]
        waited = max(waits, default=0.0)
        # else it is over, and this rank, stopped for a while, hears of it late
        if waited >= late["waited"]:
            self._reported_at = now
            self._num_reports += 1
            head = (
                f"{collective} has waited {waited:.0f} s; it fails after "
                f"{self._patience.seconds:g} s."
            )
            _log.warning("%s", "\n  ".join([head, *lines]))
        for event in meanwhile:
            self._handle(event)

    def _ask_all(self, collective: str) -> tuple[list[str], dict[int, RankStatus], list[Message]]:
        """In rank 0: the lines of a report, the ranks' answers, and other messages that came."""
        self._num_asked += 1
        self._watch.tell({"kind": _ASK, "question": self._num_asked})
        processes = self._watch.peers()
        statuses = {0: self._own_status()}
        meanwhile: list[Message] = []
        until = time.monotonic() + ANSWER_SECONDS
        while processes.keys() - statuses.keys() and (left := until - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left)
            except Empty:
                break
            if event["kind"] != _STATUS:
                meanwhile.append(event)
            elif event["question"] == self._num_asked:
                given = event["status"]
                statuses[event["rank"]] = RankStatus(**given | {"stack": tuple(given["stack"])})
        lines = stall_lines(collective, statuses, processes)
        if gone := [rank for rank in range(self._watch.info.world_size) if rank not in processes]:
            lines.append(f"{ranks_text(gone)} left the job.")
        return lines, statuses, meanwhile

    def _own_status(self) -> RankStatus:
        return own_status(self._patience, self._progress() or str)

    def _warning(self) -> float:
        warning = self._patience.stall_warning
        return warning.total_seconds() if warning is not None else 0.0
