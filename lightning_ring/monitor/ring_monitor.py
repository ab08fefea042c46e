"""`RingMonitor`: what a job does while it runs, in every logger, in TensorBoard's pages and on the progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.monitor.dashboard import Dashboard
from lightning_ring.monitor.memory import Memory
from lightning_ring.monitor.optimizer_numbers import gradient_squares, learning_rates, trust_ratios
from lightning_ring.monitor.rank_rows import RankRow, RowExchange
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.monitor.skipped_steps import SkippedSteps
from lightning_ring.monitor.step_window import StepWindow
from lightning_ring.monitor.throughput import first_dimension

_DID_NOT_STEP = -1.0  # in the place of a squared norm


class RingMonitor(Callback):
    """Logs where the time of a step goes, on all ranks, to every logger of the Trainer, under ``ring/``.

    Every ``log_every_n_steps`` steps the ranks exchange one row of numbers each; nobody waits for the rows, nor for the
    device: they are logged when they have arrived, a step later, for the step that they belong to. Between those steps
    it reads clocks, and on CUDA it records events. `RingStrategy` adds one by itself (``monitor=True``).

    Times are means over the steps since the last logged one (200 at most, without the first of all), and then over the
    ranks; their parts add up to the step. Images per second are those of all ranks, the share of data that of the
    slowest one, for which the others wait.

    Args:
        batch_size: From a batch to its number of images; default `first_dimension`.

    Attributes:
        report: The last one, on every rank.
    """

    reads_parameters = False  # gradients' norms are asked of the strategy

    def __init__(self, batch_size: Callable[[Any], int] = first_dimension) -> None:
        self.batch_size = batch_size
        self.report: RingReport | None = None
        self._fit: _Fit | None = None

    # -- what belongs to one fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._fit = _Fit(trainer)
        if trainer.is_global_zero:
            self._fit.dashboard = Dashboard(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is None:
            return
        self._receive(trainer, self._fit, wait=True)
        if self._fit.dashboard is not None:
            self._fit.dashboard.draw(self._fit.window.latest, self.report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._fit is not None:
            self._fit.close()
            self._fit = None

    # -- training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.window.restart()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._fit.dashboard is not None:
            self._fit.dashboard.draw_seldom(self._fit.window.latest, self.report)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._fit is not None and not pl_module.automatic_optimization:
            self._fit.window.timer.begin_manual_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and not pl_module.automatic_optimization:
            self._fit.window.timer.end_manual_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._fit is None:
            return
        self._fit.skipped.step_announced()
        if self._logs_this_step(trainer, self._fit):
            self._fit.squares[id(optimizer)] = gradient_squares(trainer.strategy, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is None:
            return
        self._fit.window.end_step(self._images(trainer, batch))
        logs = self._logs_this_step(trainer, self._fit)
        self._receive(trainer, self._fit, wait=logs)
        if logs:
            self._send(trainer, self._fit)

    def _logs_this_step(self, trainer: Trainer, fit: _Fit) -> bool:
        """The same on every rank: nothing in it is known to one rank only."""
        if trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return True
        number = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        return fit.log_every_n_steps > 0 and number % fit.log_every_n_steps == 0

    def _images(self, trainer: Trainer, batch: Any) -> float:
        if not getattr(trainer.strategy, "has_data", True):
            return 0.0
        try:
            return float(self.batch_size(batch))
        except TypeError:
            if self._fit is not None and not self._fit.warned_of_batch:
                self._fit.warned_of_batch = True
                rank_zero_warn(
                    f"RingMonitor cannot tell how many images a batch of type {type(batch).__name__} holds: no images "
                    "per second. Pass RingMonitor(batch_size=...), a function from a batch to its number of images."
                )
            return math.nan

    # -- one row a rank

    def _send(self, trainer: Trainer, fit: _Fit) -> None:
        taken = fit.window.take(trainer.world_size)
        skipped, uncounted = fit.skipped.count()
        device = trainer.strategy.root_device
        row = RankRow(trainer.global_rank, taken.steps, taken.images, skipped, taken.times, Memory.now(device))
        device = device if device.type == "cuda" else torch.device("cpu")
        parts = [uncounted.reshape(1), *_squares(trainer.optimizers, fit.squares)]
        on_device = torch.cat([part.to(device, non_blocking=True) for part in parts])
        fit.pending = _Pending(
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            num_optimizers=len(trainer.optimizers),
            learning_rates=learning_rates(trainer.optimizers) if trainer.is_global_zero else {},
            trust_ratios=trust_ratios(trainer.optimizers) if trainer.is_global_zero else torch.empty(0),
            rows=RowExchange(fit.communicator, row, on_device, device),
        )
        fit.squares.clear()

    def _receive(self, trainer: Trainer, fit: _Fit, *, wait: bool) -> None:
        pending = fit.pending
        if pending is None or not (wait or pending.rows.done()):
            return
        fit.pending = None
        self.report = pending.report()
        if not trainer.is_global_zero:
            return
        scalars = self.report.scalars()
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=self.report.step)
        if fit.dashboard is not None:
            fit.dashboard.add_histograms(self.report)
        if trainer.progress_bar_callback is not None:
            # where `self.log(..., prog_bar=True)` ends up, for any bar to show; the property of that name would
            # compute the epoch's metrics, with collectives in which no other rank takes part
            trainer._logger_connector._progress_bar_metrics.update(self.report.bar())  # type: ignore[arg-type]


class _Fit:
    """What a monitor holds while its Trainer fits."""

    def __init__(self, trainer: Trainer) -> None:
        self.window = StepWindow(trainer)
        self.skipped = SkippedSteps(trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None))
        self.communicator: Communicator | None = getattr(trainer.strategy, "communicator", None)
        if self.communicator is None and trainer.world_size > 1:
            rank_zero_warn(
                f"RingMonitor sees no other rank, and no communication, under {type(trainer.strategy).__name__}: what "
                "it logs is rank 0's. Use strategy='ring' or 'ring_sharded' for the rest."
            )
        self.squares: dict[int, Tensor] = {}
        self.pending: _Pending | None = None
        self.dashboard: Dashboard | None = None
        self.warned_of_batch = False
        # a script may give loggers, and how often to log, to rank 0 alone: all ranks exchange rows when rank 0 logs
        self.log_every_n_steps: int = trainer.strategy.broadcast(trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.window.close()
        self.skipped.remove()


@dataclass(slots=True)
class _Pending:
    """A logged step, until all ranks' rows are here."""

    step: int
    num_optimizers: int
    learning_rates: dict[str, float]
    trust_ratios: Tensor
    rows: RowExchange

    def report(self) -> RingReport:
        rows, sums = self.rows.finish()
        uncounted, squares, buckets = sums[0], sums[1 : 1 + self.num_optimizers], sums[1 + self.num_optimizers :]
        ratios = self.trust_ratios
        return RingReport(
            step=self.step,
            rows=rows,
            gradient_norms=[None if square < 0 else math.sqrt(square) for square in squares.tolist()],
            bucket_norms=buckets.sqrt().tolist(),
            skipped=rows[0].skipped + float(uncounted) / len(rows),  # all ranks skip the same steps
            learning_rates=self.learning_rates,
            trust_ratios=ratios[~ratios.isnan()],
        )


def _squares(optimizers: Sequence[Optimizer], by_id: dict[int, Tensor]) -> list[Tensor]:
    """Sum of each optimizer's squares, then the sum over optimizers of each bucket's."""
    found = [by_id.get(id(optimizer)) for optimizer in optimizers]
    missing = torch.full((1,), _DID_NOT_STEP, dtype=torch.float64)
    buckets = [one for one in found if one is not None]
    total = [torch.stack(buckets).sum(0)] if buckets else []
    return [missing if one is None else one.sum().reshape(1) for one in found] + total


def add_monitor(trainer: Trainer) -> None:
    """Put a `RingMonitor` before ``trainer``'s callbacks, unless there is one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not trainer.barebones and not any(isinstance(one, RingMonitor) for one in callbacks):
        callbacks.insert(0, RingMonitor())
