"""Where the time of a training step goes: marks while it runs, then seconds by phase, without the
time that collectives cost each of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_ring.comm.recording import CollectiveRecord, Listener, tell
from lightning_ring.comm.timing import Mark, elapsed, is_reached, now
from lightning_ring.errors import RingError
from lightning_ring.host.accelerator import is_gpu

PHASES = ("data", "copy", "forward", "backward", "optimizer")
# a phase, its begin and its end
Span = tuple[str, Mark, Mark]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one training step, from the end of the step before to its own end, or means over
    several steps.

    Validation and checkpoints between two steps do not count. Parts up to ``exposed`` add up to
    ``total``, except on CUDA, where ``forward``, ``backward`` and ``optimizer`` are the device's
    time and the others the host's. The parts hold no communication once `break_down` has taken it
    out of them.

    Attributes:
        data: Waiting for the next batch.
        copy: Handing the batch to the device.
        forward: ``training_step``, without the backward of manual optimization.
        backward: Backward; with a strategy that averages gradients in it, waiting for that too.
        optimizer: ``optimizer_step`` without the forward and backward that Lightning runs inside
            it.
        other: Hooks, callbacks, loggers.
        exposed: Lost to collectives: starting them, and waiting for them.
        total: The step.
        busy: During which some collective was under way.
        sent: Bytes that this rank sends for the step's collectives on a ring, as nccl-tests count
            them for the bus bandwidth ``sent / busy``: 2(N-1)/N of an all-reduce's, (N-1)/N of a
            reduce-scatter's or an all-gather's.
        images: Of this rank; NaN where they cannot be counted.
        steps: Number of steps that these are means over.
    """

    data: float = 0.0
    copy: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    exposed: float = 0.0
    total: float = 0.0
    busy: float = 0.0
    sent: float = 0.0
    images: float = math.nan
    steps: float = 1.0

    @classmethod
    def unknown(cls) -> StepTimes:
        return replace(cls(*[math.nan] * len(fields(cls))), steps=0.0)

    @property
    def hidden(self) -> float:
        """Seconds of communication under computation of this rank."""
        return max(0.0, self.busy - self.exposed)

    @property
    def own(self) -> float:
        """Seconds without those lost to collectives, where ranks wait for the slowest."""
        return self.total - self.exposed


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean of each number over ``steps``, at least one, each of one step."""
    means = map(fmean, zip(*map(astuple, steps), strict=True))
    return replace(StepTimes(*means), steps=float(len(steps)))


class StepRecord:
    """Marks of one step, clock readings or CUDA events.

    Attributes:
        began: When the step began, by the timer's clock.
        total: Seconds until it ended.
        marks: Phases in the order of their ends. They may nest: Lightning runs forward and backward
            within ``optimizer_step``, and a manual backward within ``training_step``.
    """

    __slots__ = ("_open", "began", "marks", "total")

    def __init__(self) -> None:
        self.began = self.total = 0.0
        self.marks: list[Span] = []
        self._open: dict[str, list[Mark]] = {}

    def begin(self, phase: str, mark: Mark) -> None:
        self._open.setdefault(phase, []).append(mark)

    def end(self, phase: str, mark: Mark) -> None:
        """Of a phase that was begun twice only the outer end counts."""
        begins = self._open.get(phase)
        if begins:
            begin = begins.pop()
            if not begins:
                self.marks.append((phase, begin, mark))

    def has(self, phase: str) -> bool:
        return any(name == phase for name, _, _ in self.marks)

    def finished(self) -> bool:
        return all(is_reached(end) for _, _, end in self.marks)

    def phase_at(self, moment: float) -> str | None:
        """The part of `StepTimes` that the host was in, as far as host clocks timed it; `None`
        outside this step.
        """
        around = [
            (begin, -end, phase)
            for phase, begin, end in self.marks
            if isinstance(begin, float) and begin <= moment <= end
        ]
        if around:
            return max(around)[2]
        return "other" if self.began <= moment <= self.began + self.total else None

    def times(self) -> StepTimes:
        """Of each phase without those that ran inside it, by the host's clock or the device's."""
        spent = dict.fromkeys(PHASES, 0.0)
        for on_device in (False, True):
            marks = [mark for mark in self.marks if isinstance(mark[1], float) != on_device]
            origin = marks[0][1] if on_device and marks else 0.0
            # not inside another one, as far as the phases have ended
            outer: list[tuple[float, float]] = []
            for phase, begin, end in marks:
                start, stop = elapsed(origin, begin), elapsed(origin, end)
                inside = sum(last - first for first, last in outer if first >= start)
                spent[phase] += stop - start - inside
                outer = [*(span for span in outer if span[0] < start), (start, stop)]
        other = max(0.0, self.total - sum(spent.values()))
        return StepTimes(**spent, other=other, total=self.total)


# last part of Lightning's own names for what it does
_ANNOUNCED = {
    "train_dataloader_next": "data",
    "batch_to_device": "copy",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}
_INTERRUPTIONS = {
    "validation_step": "validation batch",
    "test_step": "test batch",
    "save_checkpoint": "checkpoint",
}


@cache
def _phase_of(action_name: str, hook: str) -> str | None:
    """The phase that Lightning announces by ``action_name``. Without a class in front of it,
    "optimizer_step" is that of manual optimization, whose backward only a ``hook`` of the module
    announces.
    """
    ours = ("[Strategy]", "[_TrainingEpochLoop]", "[LightningModule]", "optimizer_step")
    if not action_name.startswith(ours):
        return None
    return (_ANNOUNCED | {hook: "backward"}).get(_last(action_name))


def _last(action_name: str) -> str:
    return action_name.rpartition(".")[2]


class StepTimer:
    """Stands before a Trainer's profiler, which goes on as it was, and times steps by the actions
    it announces.

    Costs clock reads, on a GPU also events; nothing waits for the device.

    Args:
        inner: The profiler that the Trainer had.
        device: Where the model is.
        clock: Seconds, monotonic.

    Attributes:
        listeners: Called with each step's record when the step ends.
        interruption_listeners: Called with what it was (``"validation batch"``, ``"test batch"``,
            ``"checkpoint"``), when it began and when it ended, by the clock.
        failure: What went wrong in timing, after which no step is recorded any more; training goes
            on.
    """

    def __init__(
        self, inner: Profiler, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.inner = inner
        self._clock = clock
        self._device = device
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.interruption_listeners: list[Callable[[str, float, float], None]] = []
        self.failure: Exception | None = None
        self._users = 0
        self._interrupted = clock()
        self._record = StepRecord()
        self._began: float | None = None

    @classmethod
    def attach(
        cls, trainer: Trainer, listener: Callable[[StepRecord], None], **arguments: Any
    ) -> StepTimer:
        """Put a timer before ``trainer``'s profiler; one that is there already is shared, with its
        own arguments. Each user calls `detach` once.
        """
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, cls):
            profiler = cls(profiler, trainer.strategy.root_device, **arguments)
            trainer.profiler = profiler  # type: ignore[attr-defined]
        profiler._users += 1
        profiler.listeners.append(listener)
        return profiler

    def detach(self, trainer: Trainer, listener: Callable[[StepRecord], None]) -> None:
        """Give the Trainer its profiler back, once all who attached this timer have detached it."""
        # one that failed is told no more
        if listener in self.listeners:
            self.listeners.remove(listener)
        self._users -= 1
        if not self._users and trainer.profiler is self:  # type: ignore[attr-defined]
            trainer.profiler = self.inner  # type: ignore[attr-defined]

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._note(self._begin, action_name)

    def stop(self, action_name: str) -> None:
        self._note(self._end, action_name)
        self.inner.stop(action_name)

    def _note(self, note: Callable[[str], None], action_name: str) -> None:
        if self.failure is not None:
            return
        try:
            note(action_name)
        except RingError:
            raise
        # no more records, rather than wrong ones, and training goes on
        except Exception as error:
            self.failure = error

    def _begin(self, action_name: str) -> None:
        phase = _phase_of(action_name, "on_before_backward")
        if phase is not None:
            if self._began is None:
                self._began = self._clock()
            self._record.begin(phase, self._mark(phase))
        elif _last(action_name) in _INTERRUPTIONS:
            self._interrupted = self._clock()

    def _end(self, action_name: str) -> None:
        phase = _phase_of(action_name, "on_after_backward")
        if phase is not None:
            self._record.end(phase, self._mark(phase))
        elif action_name == "run_training_batch" and self._began is not None:
            ended = self._clock()
            record, began = self._record, self._began
            record.began, record.total = began, ended - began
            self._record, self._began = StepRecord(), ended
            tell(self.listeners, record)
        elif what := _INTERRUPTIONS.get(_last(action_name)):
            self.restart()
            for listener in self.interruption_listeners:
                listener(what, self._interrupted, self._clock())

    def restart(self) -> None:
        """The next step begins with its own first action: what happens until then is no part of
        training.
        """
        self._record, self._began = StepRecord(), None

    def _mark(self, phase: str) -> Mark:
        on_host = not is_gpu(self._device) or phase in ("data", "copy")
        return self._clock() if on_host else now(self._device)

    # what else the Trainer asks of its profiler, the inner one answers
    profile = Profiler.profile

    def __getattr__(self, name: str) -> Any:
        # while it is copied or unpickled there is nothing to delegate to yet
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


# -- collectives


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Moments of one collective, in seconds of one clock: the host's, or on CUDA the device's.
    ``losses``: when its caller was held up.
    """

    began: float
    ended: float
    losses: Sequence[tuple[float, float]]


def break_down(
    record: StepRecord, collectives: Sequence[CollectiveRecord], world_size: int
) -> StepTimes:
    """The times of a finished step, with the time of the `collectives_of` it taken out of its
    parts.
    """
    times = record.times()
    spent = {part: getattr(times, part) for part in (*PHASES, "other")}
    exposed = busy = sent = 0.0
    for one, when in zip(collectives, collective_times(collectives), strict=True):
        busy += when.ended - when.began
        sent += sent_bytes(one, world_size)
        for start, stop in when.losses:
            part = _part_of(record, one, start)
            # without a part it was called in the step before
            if part is not None:
                exposed += stop - start
                spent[part] = max(0.0, spent[part] - (stop - start))
    return replace(times, **spent, exposed=exposed, busy=busy, sent=sent)


def collectives_of(record: StepRecord, told: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """Those that were waited for in the step, in the order of their calls: a validation between two
    has its own, and parameters are waited for as they are used."""
    ended = record.began + record.total
    mine = (one for one in told if record.began <= one.waited_from <= ended)
    return sorted(mine, key=lambda one: one.called)


def collective_times(collectives: Sequence[CollectiveRecord]) -> list[CollectiveTimes]:
    """As one after the other: each began when it was called or when those before it had ended,
    whichever was later. Device times count from the first call.

    Where two were on the wire at once, as over Gloo, the time counts for the earlier one, and once:
    sums of ``ended - began`` are the time in which some collective was under way.
    """
    found = []
    origin: Mark = None
    previous = -math.inf
    for one in collectives:
        losses = [(one.called, one.returned), (one.waited_from, one.waited_until)]
        if one.events is None:
            called, ended = one.called, one.waited_until if one.ended is None else one.ended
        else:
            origin = one.events[0] if origin is None else origin
            called, ended = (elapsed(origin, event) for event in one.events)
            waited = elapsed(origin, one.wait_event)
            losses = [(waited, max(waited, ended))]
        began = min(max(called, previous), ended)
        previous = max(previous, ended)
        found.append(CollectiveTimes(began, ended, losses))
    return found


def sent_bytes(collective: CollectiveRecord, world_size: int) -> float:
    """What this rank sends for ``collective`` on a ring."""
    if collective.kind == "broadcast":
        return collective.nbytes
    rounds = 2 if collective.kind == "all_reduce" else 1
    return rounds * (world_size - 1) / world_size * collective.nbytes


def _part_of(record: StepRecord, collective: CollectiveRecord, start: float) -> str | None:
    if collective.events is None:
        return record.phase_at(start)
    # of buffers, before forward
    if collective.kind == "broadcast":
        return "other"
    # the device's clock knows no phases, but who waits for what is known: forward for parameters,
    # backward for the rest
    gathers = collective.kind == "all_gather" or not record.has("backward")
    return "forward" if gathers else "backward"


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """``images`` of this rank; NaN where nobody can tell."""

    record: StepRecord
    collectives: Sequence[CollectiveRecord]
    images: float

    def finished(self) -> bool:
        """Whether the device has come past all of it, so that its events can be read."""
        return self.record.finished() and all(
            is_reached(one.events[1]) and is_reached(one.wait_event)
            for one in self.collectives
            if one.events is not None
        )


class StepWindow:
    """Keeps up to 200 steps until `take`, with their collectives, which it is told by
    ``listeners``.

    The rest happens in `take`. The first step of all is left out: it makes plans, connections and
    optimizer state.
    """

    def __init__(self, listeners: list[Listener]) -> None:
        self._listeners = listeners
        listeners.append(self._on_collective)
        self._told: list[CollectiveRecord] = []
        self._ended: tuple[StepRecord, list[CollectiveRecord]] | None = None
        self._steps = deque[RecordedStep](maxlen=200)
        self._first = True

    def on_step(self, record: StepRecord) -> None:
        """A step has ended: a listener of `StepTimer`."""
        self._ended, self._told = (record, collectives_of(record, self._told)), []

    def end_step(self, images: float) -> None:
        """The step that ended last counts, with so many images of this rank."""
        if self._ended is not None:
            self._steps.append(RecordedStep(*self._ended, images))
            self._ended = None

    def take(self, world_size: int) -> StepTimes:
        """Means over the steps since the last call that the device has finished."""
        steps = []
        while self._steps and self._steps[0].finished():
            steps.append(self._steps.popleft())
        if not steps:
            return StepTimes.unknown()
        if self._first and len(steps) > 1:
            del steps[0]
        self._first = False
        times = []
        for step in steps:
            found = break_down(step.record, step.collectives, world_size)
            times.append(replace(found, images=step.images))
        return mean_times(times)

    def close(self) -> None:
        """Stop listening; once."""
        # one that failed is told no more
        if self._on_collective in self._listeners:
            self._listeners.remove(self._on_collective)

    def _on_collective(self, record: CollectiveRecord) -> None:
        self._told.append(record)
