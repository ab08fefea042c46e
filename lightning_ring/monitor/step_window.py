"""The training steps since the last report, and the time that collectives cost each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning.pytorch import Trainer

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.comm.timing import elapsed
from lightning_ring.monitor.step_record import StepRecord, StepTimes, mean_times
from lightning_ring.monitor.step_timer import StepTimer

_PARTS = ("data", "copy", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Moments of one collective, in seconds of one clock: the host's, or on CUDA the device's."""

    called: float
    began: float
    ended: float
    losses: tuple[tuple[float, float], ...]


def break_down(
    record: StepRecord, collectives: Sequence[CollectiveRecord], world_size: int
) -> StepTimes:
    """The times of a finished step, with the time of the `collectives_of` it taken out of its
    parts.
    """
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
    """Those that were waited for in the step, in the order of their calls: a validation between two
    has its own, and parameters are waited for as they are used."""
    ended = record.began + record.total
    return sorted(
        (one for one in told if record.began <= one.waited_from <= ended),
        key=lambda one: one.called,
    )


def collective_times(collectives: Sequence[CollectiveRecord]) -> list[CollectiveTimes]:
    """As one after the other: each began when it was called or when those before it had ended,
    whichever was later.

    Where two were on the wire at once, as over Gloo, the time counts for the earlier one, and once:
    sums of ``ended - began`` are the time in which some collective was under way.
    """
    reference = next((one.events[0] for one in collectives if one.events is not None), None)
    found: list[CollectiveTimes] = []
    previous = float("-inf")
    for one in collectives:
        if one.events is None:
            called, ended = one.called, one.ended if one.ended is not None else one.waited_until
            losses: tuple[tuple[float, float], ...] = (
                (one.called, one.returned),
                (one.waited_from, one.waited_until),
            )
        else:
            called, ended = (elapsed(reference, event) for event in one.events)
            waited = elapsed(reference, one.wait_event) if one.wait_event is not None else ended
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
    events = (
        event
        for one in collectives
        if one.events is not None
        for event in (one.events[1], one.wait_event)
    )
    return record.finished() and all(event is None or event.query() for event in events)


def _part_of(record: StepRecord, collective: CollectiveRecord, start: float) -> str | None:
    if collective.events is None:
        return record.phase_at(start)
    if collective.kind == "broadcast":  # of buffers, before forward
        return "other"
    # the device's clock knows no phases, but who waits for what is known: forward for parameters,
    # backward for the rest
    return (
        "forward" if collective.kind == "all_gather" or not record.has("backward") else "backward"
    )


_MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """``images`` of this rank; NaN where nobody can tell. ``number`` counts from 0 at the start
    of training.
    """

    number: int
    record: StepRecord
    collectives: list[CollectiveRecord]
    images: float


class StepWindow:
    """Listens to a Trainer's profiler and to its strategy's collectives, and keeps up to 200 steps
    until `take`.

    Costs what `StepTimer` and `RecordedCommunicator` cost; the rest happens in `take`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.timer = StepTimer.attach(trainer)  # the Trainer's
        self.timer.listeners.append(self._on_step)
        self._listeners: list[Callable[[CollectiveRecord], None]] = getattr(
            trainer.strategy, "listeners", []
        )
        self._listeners.append(self._on_collective)
        self._collectives: list[CollectiveRecord] = []
        self._ended: tuple[StepRecord, list[CollectiveRecord]] | None = None
        self._steps: deque[RecordedStep] = deque(maxlen=_MOST_STEPS)
        self._count = 0
        self.latest: RecordedStep | None = None  # the last step that was taken

    def restart(self) -> None:
        """What happened since the last step is no part of training."""
        self.timer.restart()
        self._collectives = []

    def end_step(self, images: float) -> None:
        """The step that ended last counts, with so many images of this rank."""
        if self._ended is not None:
            self._steps.append(RecordedStep(self._count, *self._ended, images))
            self._ended = None
            self._count += 1

    def take(self, world_size: int) -> StepTimes:
        """Means over the steps since the last call that the device has finished.

        The first step of all is left out, where there are others: it makes plans, connections and
        optimizer state. Raises `RuntimeError`: steps could not be timed.
        """
        if self.timer.failure is not None:
            raise RuntimeError("steps could not be timed") from self.timer.failure
        steps: list[RecordedStep] = []
        while self._steps and finished(self._steps[0].record, self._steps[0].collectives):
            steps.append(self._steps.popleft())
        if not steps:
            return StepTimes.unknown()
        self.latest = steps[-1]
        if steps[0].number == 0 and len(steps) > 1:
            del steps[0]
        times = (
            replace(break_down(step.record, step.collectives, world_size), images=step.images)
            for step in steps
        )
        return mean_times(list(times))

    def close(self) -> None:
        """Stop listening; once."""
        if self._on_step in self.timer.listeners:  # one that failed is told no more
            self.timer.listeners.remove(self._on_step)
        if self._on_collective in self._listeners:
            self._listeners.remove(self._on_collective)
        self.timer.detach(self._trainer)

    def _on_step(self, record: StepRecord) -> None:
        self._ended, self._collectives = (record, collectives_of(record, self._collectives)), []

    def _on_collective(self, record: CollectiveRecord) -> None:
        self._collectives.append(record)
