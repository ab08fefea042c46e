"""The training steps since the last report, with the collectives of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning.pytorch import Trainer

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.monitor.breakdown import break_down, collectives_of, finished
from lightning_ring.monitor.step_record import StepRecord, StepTimes, mean_times
from lightning_ring.monitor.step_timer import StepTimer

_MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """``images`` of this rank; NaN where nobody can tell. ``number`` counts from 0 at the start of training."""

    number: int
    record: StepRecord
    collectives: list[CollectiveRecord]
    images: float


class StepWindow:
    """Listens to a Trainer's profiler and to its strategy's collectives, and keeps up to 200 steps until `take`.

    Costs what `StepTimer` and `RecordedCommunicator` cost; the rest happens in `take`.

    Attributes:
        timer: The Trainer's.
        latest: The last step that was taken.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.timer = StepTimer.attach(trainer)
        self.timer.listeners.append(self._on_step)
        self._listeners: list[Callable[[CollectiveRecord], None]] = getattr(trainer.strategy, "listeners", [])
        self._listeners.append(self._on_collective)
        self._collectives: list[CollectiveRecord] = []
        self._ended: tuple[StepRecord, list[CollectiveRecord]] | None = None
        self._steps: deque[RecordedStep] = deque(maxlen=_MOST_STEPS)
        self._count = 0
        self.latest: RecordedStep | None = None

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

        The first step of all is left out, where there are others: it makes plans, connections and optimizer state.

        Raises:
            RuntimeError: Steps could not be timed.
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
        return mean_times(
            [replace(break_down(step.record, step.collectives, world_size), images=step.images) for step in steps]
        )

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
