"""`LoopMonitor`: where the time of a step goes in a loop of Fabric's, in its loggers."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.monitor.failures import MonitorFailures
from lightning_ring.monitor.optimizer_numbers import learning_rates, trust_ratios
from lightning_ring.monitor.rank_rows import RankMemory, RankRow, RowExchange
from lightning_ring.monitor.ring_report import LoggedStep, RingReport
from lightning_ring.monitor.step_record import StepRecord, StepTimes, mean_times
from lightning_ring.monitor.step_window import break_down, collectives_of

_MOST_STEPS = 200  # that a mean is taken over


class LoopMonitor:
    """Logs where the time of a step goes, on all ranks: ``Fabric(callbacks=[LoopMonitor()],
    loggers=...)``.

    Fabric tells of each step of an optimizer. A step ends with that of the optimizer that stepped
    first, and begins where the one before ended. Scalars have `RingMonitor`'s names, under
    ``ring/``. Backward, data and all else that a loop does not announce are in ``other``; in a
    single process forward and optimizer are not told apart either. Rows of numbers are exchanged
    without waiting, and logged a step later. It never ends a training, except for errors of
    communication or of a logger.

    Args:
        log_every_n_steps: Steps between two logged ones; the same on all ranks.

    Attributes:
        report: The last one, on every rank.
    """

    def __init__(self, log_every_n_steps: int = 50) -> None:
        if (
            not isinstance(log_every_n_steps, int)
            or isinstance(log_every_n_steps, bool)
            or log_every_n_steps < 1
        ):
            raise ConfigurationError(
                f"LoopMonitor got log_every_n_steps={log_every_n_steps!r}, expected a number of "
                "steps, 1 or more."
            )
        self.log_every_n_steps = log_every_n_steps
        self.report: RingReport | None = None
        self._fabric: Any = None
        self._first: Optimizer | None = None
        self._step = 0
        self._record = StepRecord()
        self._told: list[CollectiveRecord] = []
        self._steps: deque[tuple[StepRecord, list[CollectiveRecord]]] = deque(maxlen=_MOST_STEPS)
        self._pending: LoggedStep | None = None
        self._left_out = MonitorFailures()

    def on_after_setup(self, fabric: Any, module: Any = None) -> None:
        """Fabric calls it for each module that is set up with optimizers."""
        strategy = fabric.strategy
        if self._fabric is fabric:
            return
        if getattr(strategy, "timeline", None) is None or not hasattr(strategy, "listeners"):
            raise ConfigurationError(
                f"LoopMonitor reads its times from the strategy, and {type(strategy).__name__} has "
                "none for it. Use Fabric(strategy='ring') or 'ring_sharded'."
            )
        self._fabric = fabric
        strategy.listeners.append(self._told.append)
        strategy.timeline.observers.append(self._phase)
        self._begin_step()

    def on_after_optimizer_step(self, strategy: Any, optimizer: Optimizer) -> None:
        """Fabric calls it. Collective where a step is logged."""
        self._first = self._first or optimizer
        if self._fabric is None or optimizer is not self._first:
            return
        self._step += 1
        self._left_out.run("step times", None, self._end_step)
        self._receive(wait=self._step % self.log_every_n_steps == 0)
        if self._step % self.log_every_n_steps == 0:
            self._send(strategy)

    def _phase(self, phase: str, began: Any, ended: Any) -> None:
        self._record.begin(phase, began)
        self._record.end(phase, ended)

    def _begin_step(self) -> None:
        self._record = StepRecord()
        self._record.began = time.perf_counter()

    def _end_step(self) -> None:
        record = self._record
        record.total = time.perf_counter() - record.began
        collectives = collectives_of(record, self._told)
        self._told.clear()
        self._begin_step()
        if self._step > 1:  # the first step of all is slower than those that follow
            self._steps.append((record, collectives))

    def _times(self, world_size: int) -> StepTimes:
        ready = [(record, collectives) for record, collectives in self._steps if record.finished()]
        self._steps.clear()
        if not ready:
            return StepTimes.unknown()
        times = mean_times(
            [break_down(record, collectives, world_size) for record, collectives in ready]
        )
        unknown = ["data", "copy", "backward"]
        if not any(record.has("forward") for record, _ in ready):
            unknown += ["forward", "optimizer", "other"]
        return replace(times, **dict.fromkeys(unknown, math.nan))

    def _send(self, strategy: Any) -> None:
        """Every rank sends a row of one length, whatever failed."""
        run, device = self._left_out.run, strategy.root_device
        times = run("step times", StepTimes.unknown(), self._times, strategy.world_size)
        memory = run("memory", RankMemory.unknown(), RankMemory.now, device)
        optimizers = [self._first] if self._first is not None else []
        place = device if is_gpu(device) else torch.device("cpu")
        self._pending = LoggedStep(
            step=self._step,
            learning_rates=run("learning rates", {}, learning_rates, optimizers),
            trust_ratios=run("trust ratios", torch.empty(0), trust_ratios, optimizers),
            rows=RowExchange(
                strategy.communicator if strategy.steps_together else None,
                RankRow(strategy.global_rank, math.nan, times, memory),
                torch.zeros(1, dtype=torch.float64),
                place,
            ),
        )

    def _receive(self, *, wait: bool) -> None:
        pending = self._pending
        if pending is None or not (wait or pending.rows.done()):
            return
        self._pending = None
        pending.rows.wait()
        report = self._left_out.run("report", None, pending.report)
        if report is None:
            return
        self.report = report
        if self._fabric.is_global_zero:
            self._fabric.log_dict(
                self._left_out.run("report", {}, report.scalars), step=report.step
            )
