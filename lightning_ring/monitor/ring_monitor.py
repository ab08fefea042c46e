"""`RingMonitor`: what a job does while it runs, in every logger, in TensorBoard's pages and on the
progress bar.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.monitor.dashboard import Dashboard
from lightning_ring.monitor.ring_report import (
    UNKNOWN,
    LoggedStep,
    RankMemory,
    RankRow,
    RingReport,
    RowExchange,
    SkippedSteps,
    gradient_squares,
    learning_rates,
    trust_ratios,
)
from lightning_ring.monitor.step_times import StepTimes, StepWindow

P = ParamSpec("P")
T = TypeVar("T")


class MonitorFailures:
    """Runs a monitor's own computations, each of which belongs to a part of what it shows.

    An exception in one makes its result a default. The rank warns once a part. A `RingError`
    passes: it is the job's.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def run(
        self, part: str, default: T, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What ``compute`` returns, or ``default`` where it raises."""
        try:
            return compute(*args, **kwargs)
        except RingError:
            raise
        except Exception as error:
            if part not in self._failed:
                self._failed.add(part)
                warnings.warn(
                    "lightning_ring: the monitor failed on rank "
                    f"{getattr(rank_zero_only, 'rank', 0)} and leaves out its {part}: "
                    f"{type(error).__name__}: {error}. Training goes on. "
                    "RingStrategy(monitor=False) measures nothing.",
                    stacklevel=2,
                )
            return default


def first_dimension(batch: Any) -> int:
    """Length of the first tensor in ``batch`` (any nesting of tuples, lists and dicts).

    Raises `TypeError`: there is no tensor with a batch dimension.
    """
    for leaf in tree_iter(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(
        f"There is no tensor with a batch dimension in a batch of type {type(batch).__name__}, by "
        "which to count its images. Give the callback batch_size=, a function from a batch to its "
        "number of images."
    )


class RingMonitor(Callback):
    """Logs where the time of a step goes, on all ranks, to every logger of the Trainer, under
    ``ring/``.

    Every ``log_every_n_steps`` steps the ranks exchange one row of numbers each; nobody waits for
    the rows, nor for the device: they are logged when they have arrived, a step later, for the step
    that they belong to. Between those steps it reads clocks, and on CUDA it records events.
    `RingStrategy` adds one by itself (``monitor=True``).

    Times are means over the steps since the last logged one (200 at most, without the first of
    all), and then over the ranks; their parts add up to the step. Images per second are those of
    all ranks, the share of data that of the slowest one, for which the others wait.

    It never ends a training. What a rank fails to compute it leaves out, and warns of it once; it
    sends its row all the same, so that ranks stay together. Errors of communication, and of a
    logger, are raised.

    Args:
        batch_size: From a batch to its number of images; default `first_dimension`.

    Attributes:
        report: The last one, on every rank.
        fit: Of the current fit what it holds, with ``log_every_n_steps`` of all ranks.
    """

    def __init__(self, batch_size: Callable[[Any], int] = first_dimension) -> None:
        self.batch_size = batch_size
        self.report: RingReport | None = None
        self.fit: _Fit | None = None

    def on_after_setup(self, **_: Any) -> None:
        """Fabric calls it, and would then call nothing that this callback knows."""
        raise ConfigurationError(
            "Fabric(callbacks=[RingMonitor()]): RingMonitor watches a Trainer's fit. Record a "
            "timeline instead: RingFabricStrategy(timeline='trace.json')."
        )

    # -- what belongs to one fit

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        self._close(trainer)
        fit = self.fit = _Fit(trainer)
        if trainer.is_global_zero:
            fit.open_pages(trainer)
            fit.tell(Dashboard.record_start, trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self.fit:
            self._receive(trainer, self.fit, wait=True)
            self.fit.tell(Dashboard.record_end, trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.fit:
            self.fit.tell(Dashboard.record_end, trainer, exception)
        self._close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        fit, self.fit = self.fit, None
        if fit:
            fit.close(trainer)

    def on_ranks_changed(self, trainer: Trainer, scalars: dict[str, float], text: str) -> None:
        """Ranks have died or come, as ``text`` says; ``scalars`` are logged. Calls no
        collective.
        """
        fit = self.fit
        if fit is None or not trainer.is_global_zero:
            return
        # another rank was rank 0 before
        if fit.dashboard is None:
            fit.open_pages(trainer, begins=False)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        fit.tell(Dashboard.add_text, "ring/ranks", text, trainer.global_step)

    # -- training

    def on_train_epoch_start(self, *_: Any) -> None:
        if self.fit:
            # what happened since the last step is no part of training
            self.fit.window.timer.restart()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        fit = self.fit
        if fit is None:
            return
        if fit.skipped:
            fit.skipped.announced += 1
        if self._logs_this_step(trainer, fit):
            fit.squares[optimizer] = fit.run(
                "gradient norms", UNKNOWN, gradient_squares, trainer.strategy, optimizer
            )
            # After the step a schedule has set the next one's.
            fit.rates = fit.run("numbers of the optimizers", {}, learning_rates, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit = self.fit
        if fit is None:
            return
        images = 0.0
        if getattr(trainer.strategy, "has_data", True):
            images = fit.run("images per second", math.nan, self.batch_size, batch)
        fit.window.end_step(images)
        logs = self._logs_this_step(trainer, fit)
        self._receive(trainer, fit, wait=logs)
        if logs:
            self._send(trainer, fit)

    def _logs_this_step(self, trainer: Trainer, fit: _Fit) -> bool:
        """The same on every rank: nothing in it is known to one rank only."""
        every, loop = fit.log_every_n_steps, trainer.fit_loop
        due = every > 0 and (loop.epoch_loop._batches_that_stepped + 1) % every == 0
        if not due and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            return False
        manual = not trainer.lightning_module.automatic_optimization
        return manual or not loop._should_accumulate()

    # -- one row a rank

    def _send(self, trainer: Trainer, fit: _Fit) -> None:
        """Every rank sends a row of one length, whatever failed: the rest of the ranks wait for
        it.
        """
        device, is_zero = trainer.strategy.root_device, trainer.is_global_zero
        times = fit.run("step times", StepTimes.unknown(), fit.window.take, trainer.world_size)
        memory = fit.run("memory", RankMemory(*[math.nan] * 4), RankMemory.now, device)
        nothing = math.nan, torch.zeros((), dtype=torch.float64)
        skipped, uncounted = nothing
        if fit.skipped:
            skipped, uncounted = fit.run("skipped steps", nothing, fit.skipped.count)
        squares = [fit.squares.get(optimizer, UNKNOWN) for optimizer in trainer.optimizers]
        fit.squares.clear()

        algorithm: Any = getattr(trainer.strategy, "algorithm", None)

        def exchange() -> RowExchange:
            # the rank may change where others die
            row = RankRow(trainer.global_rank, skipped, times, memory)
            comm = getattr(trainer.strategy, "communicator", None)
            if algorithm and not algorithm.steps_together:
                # no rank may wait for another one between two steps: each has its own row
                comm = None
            return RowExchange(comm, row, [uncounted, *squares], device)

        # on their way to the host before the rows are sent
        optimizers = trainer.optimizers if is_zero else []
        ratios = fit.run("numbers of the optimizers", torch.empty(0), trust_ratios, optimizers)
        # where ranks may die all of them have to get the same rows
        together = getattr(trainer.strategy, "call_together", None)
        rows = exchange() if together is None else together(lambda: exchange().table())
        number = trainer.fit_loop.epoch_loop._batches_that_stepped
        fit.pending = LoggedStep(number, fit.rates if is_zero else {}, ratios, rows)

    def _receive(self, trainer: Trainer, fit: _Fit, *, wait: bool) -> None:
        """Log the last rows, once they have arrived; ``wait`` for them. Raises `RingError`."""
        pending = fit.pending
        if pending is None or not (wait or pending.arrived()):
            return
        fit.pending = None
        pending.wait()
        report = fit.run("report", None, pending.report)
        if report is None:
            return
        self.report = report
        if not trainer.is_global_zero:
            return
        scalars = fit.run("report", {}, report.scalars)
        algorithm = getattr(trainer.strategy, "algorithm", None)
        if metrics := getattr(algorithm, "metrics", None):
            scalars |= {f"ring/{name}": value for name, value in metrics().items()}
        # what is always 0 gets no chart
        fit.logged.update(name for name, value in scalars.items() if value)
        scalars = {name: value for name, value in scalars.items() if name in fit.logged}
        if changes := getattr(trainer.strategy, "rank_changes", None):
            scalars |= changes.scalars()
        for logger in trainer.loggers if scalars else ():
            # an error in it is the user's to see, as under DDP
            logger.log_metrics(scalars, step=report.step)
        fit.tell(Dashboard.add_histograms, report)
        bar = fit.run("numbers on the progress bar", {}, report.bar)
        # where `self.log(..., prog_bar=True)` ends up, for any bar to show; the property of that
        # name would compute the epoch's metrics, with collectives in which no other rank takes part
        shown: dict[str, Any] = trainer._logger_connector._progress_bar_metrics
        shown.pop("slowest", None)  # where one rank is left, there is none
        shown.update(bar)


class _Fit(MonitorFailures):
    """What a monitor holds while its Trainer fits. ``skipped`` is `None` where it could not be
    made.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        # a script may give loggers, and how often to log, to rank 0 alone: all ranks exchange rows
        # when rank 0 logs
        self.log_every_n_steps: int = trainer.strategy.broadcast(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self.window = StepWindow(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.skipped: SkippedSteps | None = self.run(
            "skipped steps", None, SkippedSteps, trainer.optimizers, scaler
        )
        if getattr(trainer.strategy, "communicator", None) is None and trainer.world_size > 1:
            rank_zero_warn(
                "RingMonitor sees no other rank, and no communication, under "
                f"{type(trainer.strategy).__name__}: what it logs is rank 0's. Use strategy='ring' "
                "or 'ring_sharded' for the rest."
            )
        self.squares: dict[Optimizer, Tensor] = {}
        self.rates: dict[str, float] = {}  # with which the step was taken
        self.dashboard: Dashboard | None = None
        self.logged: set[str] = set()
        self.pending: LoggedStep | None = None  # its rows are under way

    def open_pages(self, trainer: Trainer, begins: bool = True) -> None:
        """On rank 0."""
        self.dashboard = self.run("TensorBoard pages", None, Dashboard, trainer, begins=begins)

    def tell(self, what: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the dashboard, on rank 0."""
        if self.dashboard:
            self.run("TensorBoard pages", None, what, self.dashboard, *arguments)

    def close(self, trainer: Trainer) -> None:
        self.window.close(trainer)
        if self.skipped:
            self.skipped.remove()


def add_monitor(trainer: Trainer) -> None:
    """Put a `RingMonitor` before ``trainer``'s callbacks, unless there is one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not trainer.barebones and not any(isinstance(one, RingMonitor) for one in callbacks):
        callbacks.insert(0, RingMonitor())
