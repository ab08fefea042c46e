"""The state of each rank while a collective is late, and its description in the stall report."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.job.watch.messages import Message

NUM_FRAMES = 8
SHOWN_STACKS = 4  # different ones; ranks with the same stack share it
SHOWN_WAITING = 10  # different collectives or steps


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of one rank."""

    # that it has called and not finished; empty if none: the others wait for this rank
    collective: str = ""
    seconds: float = 0.0  # for which it has waited in that
    last: str = ""  # the collective that it finished last
    progress: str = ""  # of training
    stack: tuple[str, ...] = ()  # its main thread's calls, innermost first

    def message(self) -> Message:
        return asdict(self)

    @classmethod
    def of_message(cls, message: Message) -> RankStatus:
        given = {field.name: message[field.name] for field in fields(cls)}
        return cls(**given | {"stack": tuple(message["stack"])})


def own_status(policy: WaitPolicy, progress: Callable[[], str]) -> RankStatus:
    """The status of this rank, from any thread. It takes no lock that the main thread could
    hold.
    """
    runners = [runner for ref in policy.engines if (runner := ref()) is not None]
    under_way = [pair for runner in runners if (pair := runner.under_way()) is not None]
    going_on = {text for text, _ in under_way}  # after a thread that started it has done with it
    ended = [
        pair for runner in runners if (pair := runner.last) is not None and pair[0] not in going_on
    ]
    text, now = "", time.monotonic()
    with contextlib.suppress(Exception):  # it reads what the main thread is changing
        text = progress()
    collective, since = min(under_way, key=lambda pair: pair[1], default=("", now))
    last, _ = max(ended, key=lambda pair: pair[1], default=("", now))
    return RankStatus(collective, now - since, last, text, main_stack())


def longest_wait(statuses: Mapping[int, RankStatus], collective: str) -> float:
    """The longest time, in seconds, that a rank has waited in ``collective``."""
    return max(
        (status.seconds for status in statuses.values() if status.collective == collective),
        default=0.0,
    )


def main_stack(num_frames: int = NUM_FRAMES) -> tuple[str, ...]:
    """``file:line function: source`` of the main thread's innermost calls, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < num_frames:
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
    silent = sorted(processes.keys() - statuses.keys())
    lines = _away_lines(away, processes)
    if silent:
        verb = "are" if len(silent) > 1 else "is"
        lines.append(
            f"{_named(silent, processes)} {verb} silent: {silence_of(processes[silent[0]]['pid'])}."
        )
    waiting = {rank: status for rank, status in statuses.items() if status.collective}
    lines += _waiting_lines(collective, waiting)
    if not away and not silent:
        lines.append(
            "All ranks answer, and each is in a collective: the network is slow, or "
            "they wait for each other."
        )
        groups = _alike({rank: RankStatus(stack=status.stack) for rank, status in waiting.items()})
        for status, ranks in groups[:SHOWN_STACKS]:
            lines += [f"The main thread of {ranks_text(ranks)}:", *_indented(status.stack)]
    return lines


def silence_of(pid: int) -> str:
    return (
        "it is stopped (SIGSTOP, a debugger), its host swaps, or C code holds its interpreter. "
        f"`py-spy dump --native --pid {pid}` there shows where"
    )


def _away_lines(away: Mapping[int, RankStatus], processes: Mapping[int, Message]) -> list[str]:
    lines: list[str] = []
    groups = _alike(away)
    for status, ranks in groups[:SHOWN_STACKS]:
        verb, they = ("are", "they") if len(ranks) > 1 else ("is", "it")
        last = f"; the last that {they} finished was {status.last}" if status.last else ""
        progress = f", {status.progress}" if status.progress else ""
        lines.append(
            f"{_named(ranks, processes)} {verb} not in it{progress}{last}. The main thread, "
            "innermost call first:"
        )
        lines += _indented(status.stack)
    if rest := [rank for _, ranks in groups[SHOWN_STACKS:] for rank in ranks]:
        lines.append(
            f"{ranks_text(rest)} {'are' if len(rest) > 1 else 'is'} not in it either, at "
            "other places."
        )
    return lines


def _waiting_lines(collective: str, waiting: Mapping[int, RankStatus]) -> list[str]:
    lines: list[str] = []
    statuses = {
        rank: RankStatus(status.collective, progress=status.progress)
        for rank, status in waiting.items()
    }
    groups = _alike(statuses)
    for status, ranks in groups[:SHOWN_WAITING]:
        which = "it" if status.collective == collective else status.collective
        progress = f", {status.progress}" if status.progress else ""
        lines.append(
            f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {which}{progress}."
        )
    if rest := sum(len(ranks) for _, ranks in groups[SHOWN_WAITING:]):
        lines.append(f"{rest} more wait, at other steps or in other collectives.")
    return lines


def _alike(statuses: Mapping[int, RankStatus]) -> list[tuple[RankStatus, list[int]]]:
    """Ranks of equal status together, in the order of their lowest rank."""
    ranks: dict[RankStatus, list[int]] = {}
    for rank in sorted(statuses):
        ranks.setdefault(statuses[rank], []).append(rank)
    return list(ranks.items())


def _named(ranks: Sequence[int], processes: Mapping[int, Message]) -> str:
    if len(ranks) == 1:
        process = processes.get(ranks[0], {})
        return f"rank {ranks[0]} (host {process.get('host', '?')}, pid {process.get('pid', '?')})"
    hosts = sorted({str(processes.get(rank, {}).get("host", "?")) for rank in ranks})
    more = ", …" if len(hosts) > 10 else ""
    return (
        f"{ranks_text(ranks)} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:10])}{more})"
    )


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
