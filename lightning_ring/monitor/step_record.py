"""The times of a training step: marks while it runs, then seconds by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_ring.comm.timing import elapsed, is_reached

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
    them (`step_window.break_down`).

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
