"""Where each rank is while a collective is late, and what that says in words."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.job.watch.messages import Message

NUM_FRAMES = 8
SHOWN_STACKS = 4  # different ones; ranks with the same stack share it
SHOWN_WAITING = 10  # different collectives or steps


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        collective: What it has called and not finished; empty if nothing: it is one of those that the others wait for.
        seconds: For how long it has waited in that.
        last: The collective that it finished last; empty if none.
        progress: How far training is.
        stack: Its main thread's innermost calls, innermost first.
    """

    collective: str = ""
    seconds: float = 0.0
    last: str = ""
    progress: str = ""
    stack: tuple[str, ...] = ()

    def message(self) -> Message:
        return asdict(self)

    @classmethod
    def of_message(cls, message: Message) -> Place:
        return cls(
            message["collective"], message["seconds"], message["last"], message["progress"], tuple(message["stack"])
        )


def own_place(patience: WaitPolicy, progress: Callable[[], str]) -> Place:
    """This rank's place, from any thread. It takes no lock that the main thread could hold."""
    runners = [runner for ref in patience.engines if (runner := ref()) is not None]
    under_way = [pair for runner in runners if (pair := runner.under_way()) is not None]
    going_on = {text for text, _ in under_way}  # after a thread that started it has done with it
    ended = [pair for runner in runners if (pair := runner.last) is not None and pair[0] not in going_on]
    text, now = "", time.monotonic()
    with contextlib.suppress(Exception):  # it reads what the main thread is changing
        text = progress()
    collective, since = min(under_way, key=lambda pair: pair[1], default=("", now))
    last, _ = max(ended, key=lambda pair: pair[1], default=("", now))
    return Place(collective, now - since, last, text, main_stack())


def longest_wait(places: Mapping[int, Place], collective: str) -> float:
    """For how many seconds some rank has waited in ``collective``."""
    return max((place.seconds for place in places.values() if place.collective == collective), default=0.0)


def main_stack(num_frames: int = NUM_FRAMES) -> tuple[str, ...]:
    """``file:line function: source`` of the main thread's innermost calls, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < num_frames:
        code, line = frame.f_code, frame.f_lineno
        source = linecache.getline(code.co_filename, line).strip()
        lines.append(f"{_short(code.co_filename)}:{line} {code.co_name}: {source}"[:200])
        frame = frame.f_back
    return tuple(lines)


def _short(path: str) -> str:
    return path.rpartition("/site-packages/")[2]


def stall_lines(collective: str, places: Mapping[int, Place], homes: Mapping[int, Message]) -> list[str]:
    """What is known about a ``collective`` that is late, the cause first.

    Args:
        collective: Which; ranks that wait in another one are told apart.
        places: Of the ranks that answered.
        homes: ``host`` and ``pid`` of the ranks that were asked. Those without a place are silent.
    """
    away = {rank: place for rank, place in places.items() if not place.collective}
    silent = sorted(homes.keys() - places.keys())
    lines = _away_lines(away, homes)
    if silent:
        verb = "are" if len(silent) > 1 else "is"
        lines.append(f"{_who(silent, homes)} {verb} silent: {silence_of(homes[silent[0]]['pid'])}.")
    waiting = {rank: place for rank, place in places.items() if place.collective}
    lines += _waiting_lines(collective, waiting)
    if not away and not silent:
        lines.append("All ranks answer, and each is in a collective: the network is slow, or they wait for each other.")
        groups = _alike({rank: Place(stack=place.stack) for rank, place in waiting.items()})
        for place, ranks in groups[:SHOWN_STACKS]:
            lines += [f"The main thread of {ranks_text(ranks)}:", *_indented(place.stack)]
    return lines


def silence_of(pid: int) -> str:
    return (
        "it is stopped (SIGSTOP, a debugger), its host swaps, or C code holds its interpreter. "
        f"`py-spy dump --native --pid {pid}` there shows where"
    )


def _away_lines(away: Mapping[int, Place], homes: Mapping[int, Message]) -> list[str]:
    lines: list[str] = []
    groups = _alike(away)
    for place, ranks in groups[:SHOWN_STACKS]:
        verb, they = ("are", "they") if len(ranks) > 1 else ("is", "it")
        last = f"; the last that {they} finished was {place.last}" if place.last else ""
        progress = f", {place.progress}" if place.progress else ""
        lines.append(f"{_who(ranks, homes)} {verb} not in it{progress}{last}. The main thread, innermost call first:")
        lines += _indented(place.stack)
    if rest := [rank for _, ranks in groups[SHOWN_STACKS:] for rank in ranks]:
        lines.append(f"{ranks_text(rest)} {'are' if len(rest) > 1 else 'is'} not in it either, at other places.")
    return lines


def _waiting_lines(collective: str, waiting: Mapping[int, Place]) -> list[str]:
    lines: list[str] = []
    places = {rank: Place(place.collective, progress=place.progress) for rank, place in waiting.items()}
    groups = _alike(places)
    for place, ranks in groups[:SHOWN_WAITING]:
        which = "it" if place.collective == collective else place.collective
        progress = f", {place.progress}" if place.progress else ""
        lines.append(f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {which}{progress}.")
    if rest := sum(len(ranks) for _, ranks in groups[SHOWN_WAITING:]):
        lines.append(f"{rest} more wait, at other steps or in other collectives.")
    return lines


def _alike(places: Mapping[int, Place]) -> list[tuple[Place, list[int]]]:
    """Ranks at the same place together, in the order of their lowest rank."""
    ranks: dict[Place, list[int]] = {}
    for rank in sorted(places):
        ranks.setdefault(places[rank], []).append(rank)
    return list(ranks.items())


def _who(ranks: Sequence[int], homes: Mapping[int, Message]) -> str:
    if len(ranks) == 1:
        home = homes.get(ranks[0], {})
        return f"rank {ranks[0]} (host {home.get('host', '?')}, pid {home.get('pid', '?')})"
    hosts = sorted({str(homes.get(rank, {}).get("host", "?")) for rank in ranks})
    more = ", …" if len(hosts) > 10 else ""
    return f"{ranks_text(ranks)} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:10])}{more})"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
