"""Where the time of a training step goes: marks while it runs, then seconds by phase, without the
time that collectives cost each of them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_ring.comm.recording import CollectiveRecord, Listener, tell
from lightning_ring.comm.timing import Mark, elapsed, is_reached, now
from lightning_ring.errors import RingError
from lightning_ring.host.accelerator import is_gpu

PHASES = ("data", "copy", "forward", "backward", "optimizer")


class StepTimes(NamedTuple):
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
        return cls(*[math.nan] * len(cls._fields))._replace(steps=0.0)

    @property
    def hidden(self) -> float:
        """Seconds of communication under computation of this rank."""
        return max(0.0, self.busy - self.exposed)

    @property
    def own(self) -> float:
        """Seconds without those lost to collectives, where ranks wait for the slowest."""
        return self.total - self.exposed


class StepRecord:
    """Marks of one step, clock readings or CUDA events.

    Attributes:
        began: When the step began, by the timer's clock.
        total: Seconds until it ended.
        marks: Phases with begin and end, in the order of their ends. They may nest: Lightning runs
            forward and backward within ``optimizer_step``, and a manual backward within
            ``training_step``.
    """

    def __init__(self) -> None:
        self.began = self.total = 0.0
        self.marks: list[tuple[str, Mark, Mark]] = []
        self._open = defaultdict[str, list[Mark]](list)

    def begin(self, phase: str, mark: Mark) -> None:
        self._open[phase].append(mark)

    def end(self, phase: str, mark: Mark) -> None:
        """Of a phase that was begun twice only the outer end counts."""
        if begins := self._open[phase]:
            begin = begins.pop()
            if not begins:
                self.marks.append((phase, begin, mark))

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
        origin: Mark = None
        # by clock: not inside another one, as far as the phases have ended
        outer: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for phase, begin, end in self.marks:
            on_host = isinstance(begin, float)
            if not on_host:
                origin = origin or begin
                begin, end = elapsed(origin, begin), elapsed(origin, end)
            spans = outer[on_host]
            spent[phase] += end - begin
            while spans and spans[-1][0] >= begin:
                first, last = spans.pop()
                spent[phase] -= last - first
            spans.append((begin, end))
        other = max(0.0, self.total - sum(spent.values()))
        return StepTimes(**spent, other=other, total=self.total)


# what Lightning announces, by the last part of its own names for it
_ANNOUNCED = {
    "train_dataloader_next": "data",
    "batch_to_device": "copy",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "validation_step": "validation batch",
    "test_step": "test batch",
    "save_checkpoint": "checkpoint",
}
# the backward of manual optimization only hooks of the module announce
_BEGINS = _ANNOUNCED | {"on_before_backward": "backward"}
_ENDS = _ANNOUNCED | {"on_after_backward": "backward", "run_training_batch": "step"}


@cache
def _announced(action_name: str) -> tuple[str, str]:
    """What begins, and what ends, with an action of Lightning; empty where nobody times it. Without
    a class in front of it, "optimizer_step" is that of manual optimization.
    """
    owner, _, action = action_name.rpartition(".")
    ours = ("[Strategy]", "[_TrainingEpochLoop]", "[LightningModule]")
    if owner and not owner.startswith(ours):
        return "", ""
    return _BEGINS.get(action, ""), _ENDS.get(action, "")


class StepTimer:
    """Stands before a Trainer's profiler, which goes on as it was, and times steps by the actions
    it announces.

    Costs clock reads, on a GPU also events; nothing waits for the device.

    Args:
        inner: The profiler that the Trainer had.
        device: Where the model is.

    Attributes:
        listeners: Called with each step's record when the step ends.
        interruption_listeners: Called with what it was (``"validation batch"``, ``"test batch"``,
            ``"checkpoint"``), when it began and when it ended, by the clock.
        failure: What went wrong in timing, after which no step is recorded any more; training goes
            on.
    """

    def __init__(self, inner: Profiler, device: torch.device) -> None:
        self.inner = inner
        # seconds, monotonic
        self._clock = time.perf_counter
        self._device = device
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.interruption_listeners: list[Callable[[str, float, float], None]] = []
        self.failure: Exception | None = None
        self._interrupted = 0.0
        self._record = StepRecord()
        self._began: float | None = None

    @classmethod
    def attach(cls, trainer: Trainer, listener: Callable[[StepRecord], None]) -> StepTimer:
        """Put a timer before ``trainer``'s profiler; one that is there already is shared. Each user
        calls `detach` once.
        """
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if not isinstance(profiler, cls):
            profiler = cls(profiler, trainer.strategy.root_device)
            trainer.profiler = profiler  # type: ignore[attr-defined]
        profiler.listeners.append(listener)
        return profiler

    def detach(self, trainer: Trainer, listener: Callable[[StepRecord], None]) -> None:
        """Give the Trainer its profiler back, once all who attached this timer have detached it."""
        # one that failed is told no more
        if listener in self.listeners:
            self.listeners.remove(listener)
        if not self.listeners and trainer.profiler is self:  # type: ignore[attr-defined]
            trainer.profiler = self.inner  # type: ignore[attr-defined]

    def profile(self, action_name: str) -> Any:
        """What is not timed costs no more than without this timer."""
        profiler: Any = self if any(_announced(action_name)) else self.inner
        return Profiler.profile(profiler, action_name)

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._note(self._begin, _announced(action_name)[0])

    def stop(self, action_name: str) -> None:
        self._note(self._end, _announced(action_name)[1])
        self.inner.stop(action_name)

    def _note(self, note: Callable[[str], None], what: str) -> None:
        if self.failure or not what:
            return
        try:
            note(what)
        except RingError:
            raise
        # no more records, rather than wrong ones, and training goes on
        except Exception as error:
            self.failure = error

    def _begin(self, what: str) -> None:
        if what not in PHASES:
            self._interrupted = self._clock()
            return
        if self._began is None:
            self._began = self._clock()
        self._record.begin(what, self._mark(what))

    def _end(self, what: str) -> None:
        if what in PHASES:
            self._record.end(what, self._mark(what))
        elif what != "step":
            self.restart()
            for listener in self.interruption_listeners:
                listener(what, self._interrupted, self._clock())
        elif self._began is not None:
            ended = self._clock()
            record, began = self._record, self._began
            record.began, record.total = began, ended - began
            self._record, self._began = StepRecord(), ended
            tell(self.listeners, record)

    def restart(self) -> None:
        """The next step begins with its own first action: what happens until then is no part of
        training.
        """
        self._record, self._began = StepRecord(), None

    def _mark(self, phase: str) -> Mark:
        on_device = is_gpu(self._device) and phase not in ("data", "copy")
        return now(self._device) if on_device else self._clock()

    # what else the Trainer asks of its profiler, the inner one answers
    def __getattr__(self, name: str) -> Any:
        # while it is copied or unpickled there is nothing to delegate to yet
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


# -- collectives


def break_down(record: StepRecord, told: Iterable[CollectiveRecord], world_size: int) -> StepTimes:
    """The times of a finished step, with the time of the collectives that were waited for in it
    taken out of its parts.

    A validation between two steps has its own, and parameters are waited for as they are used.
    """
    times, ended = record.times(), record.began + record.total
    spent = {part: getattr(times, part) for part in (*PHASES, "other")}
    mine = [one for one in told if record.began <= one.waited_from <= ended]
    mine.sort(key=lambda one: one.called)
    exposed = busy = sent = 0.0
    for one, (began, over, losses) in zip(mine, collective_times(mine), strict=True):
        busy += over - began
        sent += sent_bytes(one, world_size)
        for start, stop in losses:
            part = _part_of(record, one, start)
            # without a part it was called in the step before
            if part:
                exposed += stop - start
                spent[part] = max(0.0, spent[part] - (stop - start))
    return times._replace(**spent, exposed=exposed, busy=busy, sent=sent)


def collective_times(
    collectives: Iterable[CollectiveRecord],
) -> Iterator[tuple[float, float, list[tuple[float, float]]]]:
    """When each began, when it ended, and when its caller was held up: in seconds of one clock, the
    host's, or on CUDA the device's from the first call on.

    As one after the other: each began when it was called or when those before it had ended,
    whichever was later. Where two were on the wire at once, as over Gloo, the time counts for the
    earlier one, and once: sums of these times are the time in which some collective was under way.
    """
    origin: Mark = None
    previous = -math.inf
    for one in collectives:
        losses = [(one.called, one.returned), (one.waited_from, one.waited_until)]
        if one.events is None:
            called, ended = one.called, one.waited_until if one.ended is None else one.ended
        else:
            origin = origin or one.events[0]
            called, ended = (elapsed(origin, event) for event in one.events)
            waited = elapsed(origin, one.wait_event)
            losses = [(waited, max(waited, ended))]
        began = min(max(called, previous), ended)
        previous = max(previous, ended)
        yield began, ended, losses


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
    if collective.kind == "all_gather":
        return "forward"
    return "backward" if any(phase == "backward" for phase, _, _ in record.marks) else "forward"


class StepWindow:
    """Keeps up to 200 steps of ``trainer`` until `take`, with their collectives, which its strategy
    tells.

    The rest happens in `take`. The first step of all is left out: it makes plans, connections and
    optimizer state.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._listeners: list[Listener] = getattr(trainer.strategy, "listeners", [])
        self._listeners.append(self._on_collective)
        self.timer = StepTimer.attach(trainer, self._on_step)
        self._told: list[CollectiveRecord] = []
        self._ended: tuple[StepRecord, list[CollectiveRecord]] | None = None
        # with the images of this rank; NaN where nobody can tell
        self._steps = deque[tuple[StepRecord, list[CollectiveRecord], float]](maxlen=200)
        self._first = True

    def _on_step(self, record: StepRecord) -> None:
        self._ended, self._told = (record, self._told), []

    def end_step(self, images: float) -> None:
        """The step that ended last counts, with so many images of this rank."""
        if self._ended:
            self._steps.append((*self._ended, images))
            self._ended = None

    def take(self, world_size: int) -> StepTimes:
        """Means over the steps since the last call that the device has finished. Raises
        `RuntimeError`: steps could not be timed.
        """
        if self.timer.failure:
            raise RuntimeError("steps could not be timed") from self.timer.failure
        steps = []
        while self._steps and _is_over(*self._steps[0][:2]):
            record, told, images = self._steps.popleft()
            steps.append(break_down(record, told, world_size)._replace(images=images))
        if not steps:
            return StepTimes.unknown()
        if self._first and len(steps) > 1:
            del steps[0]
        self._first = False
        means = map(fmean, zip(*steps, strict=True))
        return StepTimes(*means)._replace(steps=len(steps))

    def close(self, trainer: Trainer) -> None:
        """Stop listening; once."""
        self.timer.detach(trainer, self._on_step)
        # one that failed is told no more
        if self._on_collective in self._listeners:
            self._listeners.remove(self._on_collective)

    def _on_collective(self, record: CollectiveRecord) -> None:
        self._told.append(record)


def _is_over(record: StepRecord, told: Iterable[CollectiveRecord]) -> bool:
    """Whether the device has come past all of it, so that its events can be read."""
    events = [end for _, _, end in record.marks]
    for one in told:
        events += (one.events[1], one.wait_event) if one.events else ()
    return all(map(is_reached, events))
