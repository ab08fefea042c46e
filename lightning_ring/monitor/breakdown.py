"""The time that collectives cost a training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.monitor.step_record import StepRecord, StepTimes

_PARTS = ("data", "copy", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Moments of one collective, in seconds of one clock: the host's, or on CUDA the device's."""

    called: float
    began: float
    ended: float
    losses: tuple[tuple[float, float], ...]


def break_down(record: StepRecord, collectives: Sequence[CollectiveRecord], world_size: int) -> StepTimes:
    """The times of a finished step, with the time of the `collectives_of` it taken out of its parts."""
    times = record.times()
    spent = {part: getattr(times, part) for part in _PARTS}
    exposed = busy = 0.0
    for collective, when in zip(collectives, collective_times(collectives), strict=True):
        busy += when.ended - when.began
        for start, stop in when.losses:
            part = _part_of(record, collective, start)
            if part is not None:  # else it was called in the step before
                exposed += stop - start
                spent[part] = max(0.0, spent[part] - (stop - start))
    sent = sum(sent_bytes(collective, world_size) for collective in collectives)
    return replace(times, **spent, exposed=exposed, busy=busy, sent=sent)


def collectives_of(record: StepRecord, told: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """Those that were waited for in the step, in the order of their calls: a validation between two has its own, and
    parameters are waited for as they are used."""
    ended = record.began + record.total
    return sorted((one for one in told if record.began <= one.waited_from <= ended), key=lambda one: one.called)


def collective_times(collectives: Sequence[CollectiveRecord]) -> list[CollectiveTimes]:
    """As one after the other: each began when it was called or when those before it had ended, whichever was later.

    Where two were on the wire at once, as over Gloo, the time counts for the earlier one, and once: sums of
    ``ended - began`` are the time in which some collective was under way.
    """
    reference = next((one.events[0] for one in collectives if one.events is not None), None)
    found: list[CollectiveTimes] = []
    previous = float("-inf")
    for one in collectives:
        if one.events is None:
            called, ended = one.called, one.ended if one.ended is not None else one.waited_until
            losses: tuple[tuple[float, float], ...] = ((one.called, one.returned), (one.waited_from, one.waited_until))
        else:
            called, ended = (_since(reference, event) for event in one.events)
            waited = _since(reference, one.wait_event) if one.wait_event is not None else ended
            losses = ((waited, max(waited, ended)),)
        began = min(max(called, previous), ended)
        previous = max(previous, ended)
        found.append(CollectiveTimes(called, began, ended, losses))
    return found


def sent_bytes(collective: CollectiveRecord, world_size: int) -> float:
    """What this rank sends for ``collective`` on a ring."""
    if collective.kind == "broadcast":
        return collective.nbytes
    share = (world_size - 1) / world_size
    return (2 if collective.kind == "all_reduce" else 1) * share * collective.nbytes


def finished(record: StepRecord, collectives: Sequence[CollectiveRecord]) -> bool:
    """Whether the device has come past all of it, so that its events can be read."""
    events = (event for one in collectives if one.events is not None for event in (one.events[1], one.wait_event))
    return record.finished() and all(event is None or event.query() for event in events)


def _part_of(record: StepRecord, collective: CollectiveRecord, start: float) -> str | None:
    if collective.events is None:
        return record.phase_at(start)
    if collective.kind == "broadcast":  # of buffers, before forward
        return "other"
    # the device's clock knows no phases, but who waits for what is known: forward for parameters, backward for the rest
    return "forward" if collective.kind == "all_gather" or not record.has("backward") else "backward"


def _since(reference: Any, event: torch.cuda.Event) -> float:
    seconds: float = reference.elapsed_time(event) / 1e3
    return seconds
