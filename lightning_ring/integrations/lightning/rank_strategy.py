"""What a strategy knows of ranks, devices, collectives and failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_ring.integrations.lightning.data import ActiveRanks
from lightning_ring.integrations.ranks.strategy import OnRingRanks
from lightning_ring.options import RingOptions

if TYPE_CHECKING:
    from lightning_ring.monitor.step_timeline import StepTimeline


class RankedStrategy(OnRingRanks, DDPStrategy):  # type: ignore[misc]
    """A strategy on the launcher's ranks, whose collectives are bounded and named.

    A subclass of `DDPStrategy` only because Lightning decides by class.

    ``listeners`` are called with a `CollectiveRecord` of each collective that carries gradients or
    sharded parameters, and of `reduce` (``self.log(..., sync_dist=True)``). ``timeline`` records
    the fit in a trace: ``timeline.start(path)`` and ``timeline.stop()`` on all ranks.
    """

    def __init__(self, options: RingOptions, **of_every_strategy: Any) -> None:
        # importing a strategy loads neither the monitor nor a launcher
        from lightning_ring.monitor.step_timeline import StepTimeline
        from lightning_ring.timeline.settings import timeline_path

        super().__init__("Trainer", options, **of_every_strategy)
        self.timeline: StepTimeline = StepTimeline(
            timeline_path(options.timeline, os.environ), self.listeners
        )
        self._active_ranks = ActiveRanks()

    def setup_environment(self) -> None:
        from lightning_ring.monitor.terminal import replace_bars, widen_terminal

        self.set_world_ranks()
        widen_terminal()  # mpirun's have no width: a progress bar would draw nothing
        if self._trainer is not None:
            replace_bars(self._trainer)
        super().setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self._connect()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op, self._active_ranks.during_step)

    def on_exception(self, exception: BaseException) -> None:
        watch = self._job.watch if self._job is not None else None
        if watch is not None and not isinstance(exception, SystemExit):
            watch.report(exception)

    @property
    def has_data(self) -> bool:
        """Whether this rank's batch counts; not if it repeats one (``uneven="join"``)."""
        return self._active_ranks.has_data

    @property
    def _trainer(self) -> pl.Trainer | None:
        return getattr(self.lightning_module, "_trainer", None)

    @property
    def _alone(self) -> bool:  # type: ignore[override]
        """After an exception a rank must not wait for others."""
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED

    def _progress(self) -> str:
        """For the stall report, which asks from its own thread."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn is None or trainer.state.stage is None:
            return ""
        if trainer.state.fn != TrainerFn.FITTING:
            return f"in {trainer.state.fn.value}"
        stage = "" if trainer.training else f" ({trainer.state.stage.value})"
        return f"epoch {trainer.current_epoch}{stage}, after optimizer step {trainer.global_step}"

    @contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        # before callbacks handle the exception: they may save checkpoints while other ranks wait
        try:
            yield
        except StopIteration:
            raise  # no failure: a step that takes `dataloader_iter` ends its epoch so
        except Exception as exception:
            RankedStrategy.on_exception(self, exception)
            raise
