"""One step as a Gantt chart: what was computed, and of each bucket when it was ready, on the
wire, and waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.comm.timing import elapsed
from lightning_ring.monitor.step_record import StepRecord
from lightning_ring.monitor.step_window import collective_times
from lightning_ring.timeline.drawing import ON_THE_WIRE, READY, WAITED_FOR, Bar

_COMPUTED = ("data", "copy", "forward", "backward", "optimizer")
_MOST_COLLECTIVES = 48


def bars(record: StepRecord, collectives: Sequence[CollectiveRecord]) -> list[Bar]:
    """Everything that happened in a finished step, by the host's clock, or on CUDA by the
    device's.
    """
    spans = record.spans()
    on_device = [span for span in spans if not isinstance(span[1], float)]
    origin: Any = record.began
    if on_device:  # what the host timed itself, fetching and copying, is on another clock
        spans, origin = (
            on_device,
            min((start for _, start, _ in on_device), key=partial(elapsed, on_device[0][1])),
        )
    found = _computed(
        [
            Bar(part, part, elapsed(origin, start), elapsed(origin, stop))
            for part, start, stop in spans
        ]
    )
    collectives = collectives[:_MOST_COLLECTIVES]
    events = next((one.events for one in collectives if one.events is not None), None)
    shift = elapsed(origin, events[0]) if events is not None else -record.began
    for one, when in zip(collectives, collective_times(collectives), strict=True):
        lane = one.name or one.kind
        found.append(Bar(lane, READY, when.called + shift, when.began + shift))
        found.append(Bar(lane, ON_THE_WIRE, when.began + shift, when.ended + shift))
        start, stop = when.losses[-1]
        found.append(Bar(lane, WAITED_FOR, start + shift, stop + shift))
    return found


def _computed(innermost_first: Sequence[Bar]) -> list[Bar]:
    """In the order in which a step goes, each without what ran inside it: Lightning runs forward
    and backward within ``optimizer_step``, and a manual backward within ``training_step``."""
    found: list[Bar] = []
    for bar in innermost_first:
        found += _without(bar, sorted(found, key=lambda one: one.start))
    return sorted(found, key=lambda bar: (_COMPUTED.index(bar.lane), bar.start))


def _without(bar: Bar, others: Sequence[Bar]) -> list[Bar]:
    """The pieces of ``bar`` outside of ``others``, which are in the order of their starts."""
    pieces, start = [], bar.start
    for other in others:
        if other.stop > start and other.start < bar.stop:
            pieces.append((start, other.start))
            start = other.stop
    pieces.append((start, bar.stop))
    return [Bar(bar.lane, bar.kind, begin, end) for begin, end in pieces if end > begin]
