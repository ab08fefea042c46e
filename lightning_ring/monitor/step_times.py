"""The times of a training step: marks while it runs, then seconds by phase."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_ring.comm.recording import CollectiveRecord, passed_on, tell
from lightning_ring.comm.timing import elapsed, is_reached, now
from lightning_ring.errors import RingError
from lightning_ring.host.accelerator import is_gpu

MANUAL = "manual_optimizer"  # inside training_step, where automatic optimization has it around
_MANUAL_BACKWARD = "manual_backward"  # inside training_step too
_CLOSURE_BACKWARD = "closure_backward"  # the same, inside the manual optimizer's step
_INNERMOST_FIRST = {
    "backward": "backward",
    _CLOSURE_BACKWARD: "backward",
    _MANUAL_BACKWARD: "backward",
    MANUAL: "optimizer",
    "forward": "forward",
    "optimizer": "optimizer",
    "data": "data",
    "copy": "copy",
}
_PHASES = ("data", "copy", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one training step, from the end of the step before to its own end, or means over
    several steps.

    Validation and checkpoints between two steps do not count. Parts up to ``exposed`` add up to
    ``total``, except on CUDA, where ``forward``, ``backward`` and ``optimizer`` are the device's
    time and the others the host's. The parts hold no communication once it has been taken out of
    them (`step_times.break_down`).

    Attributes:
        data: Waiting for the next batch.
        copy: Handing the batch to the device.
        forward: ``training_step``; with manual optimization backward too, which Lightning does not
            announce then, unless a callback told `StepTimer.begin_manual_backward`.
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
    means = (
        sum(getattr(step, field.name) for step in steps) / len(steps) for field in fields(StepTimes)
    )
    return replace(StepTimes(*means), steps=float(len(steps)))


class StepRecord:
    """Marks of one step: for each phase the pairs of begin and end, clock readings or CUDA
    events.
    """

    __slots__ = ("_open", "began", "marks", "total")

    def __init__(self) -> None:
        self.began = 0.0  # when the step began, by the timer's clock
        self.marks: dict[str, list[tuple[Any, Any]]] = {}
        self.total = 0.0  # seconds until it ended
        self._open: dict[str, Any] = {}

    def begin(self, phase: str, mark: Any) -> None:
        self._open[phase] = mark

    def end(self, phase: str, mark: Any) -> None:
        if phase in self._open:
            self.marks.setdefault(phase, []).append((self._open.pop(phase), mark))

    def begin_manual_backward(self, mark: Any) -> None:
        self.begin(_CLOSURE_BACKWARD if MANUAL in self._open else _MANUAL_BACKWARD, mark)

    def end_manual_backward(self, mark: Any) -> None:
        self.end(_CLOSURE_BACKWARD if _CLOSURE_BACKWARD in self._open else _MANUAL_BACKWARD, mark)

    def phase_at(self, moment: float) -> str | None:
        """The part of `StepTimes` that the host was in, as far as host clocks timed it; `None`
        outside this step.
        """
        for name, part in _INNERMOST_FIRST.items():
            for begin, end in self.marks.get(name, ()):
                if isinstance(begin, float) and begin <= moment <= end:
                    return part
        return "other" if self.began <= moment <= self.began + self.total else None

    def has(self, part: str) -> bool:
        return any(self.marks.get(name) for name, of in _INNERMOST_FIRST.items() if of == part)

    def spans(self) -> list[tuple[str, Any, Any]]:
        """Part of `StepTimes`, begin and end of each mark: clock readings, or on a GPU events."""
        return [
            (part, *pair)
            for name, part in _INNERMOST_FIRST.items()
            for pair in self.marks.get(name, ())
        ]

    def finished(self) -> bool:
        return all(is_reached(end) for pairs in self.marks.values() for _, end in pairs)

    def times(self) -> StepTimes:
        spent = {name: self._spent(name) for name in _PHASES}
        spent["optimizer"] = max(0.0, spent["optimizer"] - self._spent_in_optimizer())
        manual, before, inside = (
            self._spent(MANUAL),
            self._spent(_MANUAL_BACKWARD),
            self._spent(_CLOSURE_BACKWARD),
        )
        spent["forward"] = max(0.0, spent["forward"] - manual - before)
        spent["backward"] += before + inside
        spent["optimizer"] += manual - inside
        other = max(0.0, self.total - sum(spent.values()))
        return StepTimes(**spent, other=other, total=self.total)

    def _spent_in_optimizer(self) -> float:
        """Seconds of the forward and backward that a closure runs in the optimizer's step;
        others come before it.
        """
        steps = self.marks.get("optimizer", ())
        inner = [pair for phase in ("forward", "backward") for pair in self.marks.get(phase, ())]
        return sum(
            elapsed(began, ended)
            for began, ended in inner
            if any(elapsed(start, began) >= 0 <= elapsed(began, stop) for start, stop in steps)
        )

    def _spent(self, phase: str) -> float:
        return sum(elapsed(*pair) for pair in self.marks.get(phase, ()))


_ANNOUNCED = {  # last part of Lightning's own names for what it does
    "train_dataloader_next": "data",
    "batch_to_device": "copy",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}
_INTERRUPTIONS = ("validation_step", "test_step", "save_checkpoint")
_STEP = "run_training_batch"


@cache
def _phase_of(action_name: str) -> str | None:
    """The phase that Lightning announces by ``action_name``; with manual optimization torch's
    step is one.
    """
    if action_name == "optimizer_step":
        return MANUAL
    ours = action_name.startswith(("[Strategy]", "[_TrainingEpochLoop]", "[LightningModule]"))
    return _ANNOUNCED.get(action_name.rsplit(".", 1)[-1]) if ours else None


class StepTimer(Profiler):
    """Stands before a Trainer's profiler, which goes on as it was, and times steps by the actions
    it announces.

    Costs clock reads, on a GPU also events; nothing waits for the device.

    Args:
        inner: The profiler that the Trainer had.
        device: Where the model is.
        clock: Seconds, monotonic.

    Attributes:
        listeners: Called with each step's record when the step ends.
        interruption_listeners: Called with what it was (``"validation_step"``, ``"test_step"``,
            ``"save_checkpoint"``), when it began and when it ended, by the clock.
        failure: What went wrong in timing, after which no step is recorded any more; training goes
            on.
    """

    def __init__(
        self, inner: Profiler, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self.inner = inner
        self._clock = clock
        self._device = device
        self._record = StepRecord()
        self._began: float | None = None
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.interruption_listeners: list[Callable[[str, float, float], None]] = []
        self._users = 0
        self.failure: Exception | None = None
        self._interrupted: dict[str, float] = {}

    @classmethod
    def attach(cls, trainer: Trainer, **arguments: Any) -> StepTimer:
        """Put a timer before ``trainer``'s profiler; one that is there already is shared, with its
        own arguments.

        Each user calls `detach` once, and takes its own listeners away.
        """
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, cls):
            profiler = cls(profiler, trainer.strategy.root_device, **arguments)
            trainer.profiler = profiler  # type: ignore[attr-defined]
        profiler._users += 1
        return profiler

    def detach(self, trainer: Trainer) -> None:
        """Give the Trainer its profiler back, once all who attached this timer have detached it."""
        self._users = max(0, self._users - 1)
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
        except Exception as error:  # no more records, rather than wrong ones, and training goes on
            self.failure = error

    def _begin(self, action_name: str) -> None:
        phase = _phase_of(action_name)
        if phase is None:
            if self.interruption_listeners and action_name.rsplit(".", 1)[-1] in _INTERRUPTIONS:
                self._interrupted[action_name] = self._clock()
            return
        if self._began is None:
            self._began = self._clock()
        self._record.begin(phase, self._mark(phase))

    def _end(self, action_name: str) -> None:
        phase = _phase_of(action_name)
        if phase is not None:
            self._record.end(phase, self._mark(phase))
        elif action_name == _STEP and self._began is not None:
            ended = self._clock()
            record, began = self._record, self._began
            record.began, record.total = began, ended - began
            self._record, self._began = StepRecord(), ended
            tell(self.listeners, record)
        elif action_name.endswith(_INTERRUPTIONS):
            self._record, self._began = StepRecord(), None
            if action_name in self._interrupted:
                interruption = (
                    action_name.rsplit(".", 1)[-1],
                    self._interrupted.pop(action_name),
                    self._clock(),
                )
                for interrupted in self.interruption_listeners:
                    interrupted(*interruption)

    def begin_manual_backward(self) -> None:
        self._record.begin_manual_backward(self._mark("backward"))

    def end_manual_backward(self) -> None:
        self._record.end_manual_backward(self._mark("backward"))

    def restart(self) -> None:
        """The next step begins with its own first action: what happens until then is no part of
        training.
        """
        self._record, self._began = StepRecord(), None

    def _mark(self, phase: str) -> Any:
        on_host = not is_gpu(self._device) or phase in ("data", "copy")
        return self._clock() if on_host else now(self._device)

    # -- what the Trainer asks of its profiler

    setup = passed_on("inner", "setup")
    teardown = passed_on("inner", "teardown")
    describe = passed_on("inner", "describe")
    summary = passed_on("inner", "summary")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # being copied or unpickled: nothing to delegate to yet
            raise AttributeError(name)
        return getattr(self.inner, name)


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
