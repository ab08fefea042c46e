"""Where the time of a training step goes: waiting for data, copying, forward, backward,
optimizer, the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler

from lightning_ring.comm.recording import passed_on, tell
from lightning_ring.comm.timing import now
from lightning_ring.errors import RingError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.monitor.step_record import MANUAL, StepRecord

_PHASES = {  # last part of Lightning's own names for what it does
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
    return _PHASES.get(action_name.rsplit(".", 1)[-1]) if ours else None


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
