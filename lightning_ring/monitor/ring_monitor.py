"""`RingMonitor`: what a job does while it runs, in every logger, in TensorBoard's pages and on
the progress bar.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.monitor.dashboard import Dashboard, record_change, record_end, record_start
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
    numbers_on_device,
    trust_ratios,
)
from lightning_ring.monitor.step_times import (
    RecordedStep,
    StepRecord,
    StepTimer,
    StepTimes,
    StepWindow,
    break_down,
    collectives_of,
    mean_times,
)
from lightning_ring.monitor.terminal import narrow

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
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(
        f"There is no tensor with a batch dimension in a batch of type {type(batch).__name__}, by "
        "which to count its images. Give the callback batch_size=, a function from a batch to its "
        "number of images."
    )


_TIMES = "step times"
_NORMS = "gradient norms"
_OPTIMIZERS = "numbers of the optimizers"
_SKIPPED = "skipped steps"
_MEMORY = "memory"
_IMAGES = "images per second"
_PAGES = "TensorBoard pages"
_REPORT = "report"
_BAR = "numbers on the progress bar"
_RECORD = "record of environment and end"


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
    """

    def __init__(self, batch_size: Callable[[Any], int] = first_dimension) -> None:
        self.batch_size = batch_size
        self.report: RingReport | None = None
        self._fit: _Fit | None = None

    def on_after_setup(self, **_: Any) -> None:
        """Fabric calls it, and would then call nothing that this callback knows."""
        raise ConfigurationError(
            "Fabric(callbacks=[RingMonitor()]): RingMonitor watches a Trainer's fit. Use "
            "lightning_ring.monitor.LoopMonitor() with Fabric."
        )

    # -- what belongs to one fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        fit = self._fit = _Fit(trainer)
        if trainer.is_global_zero:
            narrow(trainer)
            fit.dashboard = fit.left_out.run(_PAGES, None, Dashboard, trainer)
            fit.left_out.run(_RECORD, None, record_start, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is None:
            return
        self._receive(trainer, self._fit, wait=True)
        self._draw(self._fit, Dashboard.draw)
        if trainer.is_global_zero:
            self._fit.left_out.run(_RECORD, None, record_end, trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._fit is not None and trainer.is_global_zero:
            self._fit.left_out.run(_RECORD, None, record_end, trainer, exception)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._fit is not None:
            self._fit.close()
            self._fit = None

    @property
    def log_every_n_steps(self) -> int:
        """In the current fit, on all ranks."""
        return self._fit.log_every_n_steps if self._fit is not None else 0

    @log_every_n_steps.setter
    def log_every_n_steps(self, every: int) -> None:
        if self._fit is not None:
            self._fit.log_every_n_steps = every

    @property
    def skipped(self) -> SkippedSteps | None:
        """The counts of the current fit."""
        return self._fit.skipped if self._fit is not None else None

    def on_ranks_changed(self, trainer: Trainer, scalars: dict[str, float], text: str) -> None:
        """Ranks have died or come, as ``text`` says; ``scalars`` are logged. Calls no
        collective.
        """
        fit = self._fit
        if fit is None or not trainer.is_global_zero:
            return
        if fit.dashboard is None:  # another rank was rank 0 before
            narrow(trainer)
            fit.dashboard = fit.left_out.run(_PAGES, None, Dashboard, trainer, begins=False)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        fit.left_out.run(_RECORD, None, record_change, trainer, text)

    def _draw(
        self, fit: _Fit, draw: Callable[[Dashboard, RecordedStep | None, RingReport | None], None]
    ) -> None:
        if fit.dashboard is not None and fit.window is not None:
            fit.left_out.run(_PAGES, None, draw, fit.dashboard, fit.window.latest, self.report)

    # -- training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._fit.window is not None:
            self._fit.left_out.run(_TIMES, None, self._fit.window.restart)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._draw(self._fit, Dashboard.draw_seldom)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._tell_timer(pl_module, StepTimer.begin_manual_backward)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell_timer(pl_module, StepTimer.end_manual_backward)

    def _tell_timer(self, module: LightningModule, what: Callable[[StepTimer], None]) -> None:
        if (
            self._fit is not None
            and self._fit.window is not None
            and not module.automatic_optimization
        ):
            self._fit.left_out.run(_TIMES, None, what, self._fit.window.timer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._fit is None:
            return
        if self._fit.skipped is not None:
            self._fit.skipped.announced += 1
        if self._logs_this_step(trainer, self._fit):
            unknown = torch.full((), UNKNOWN, dtype=torch.float64)
            squares = self._fit.left_out.run(
                _NORMS, unknown, gradient_squares, trainer.strategy, optimizer
            )
            self._fit.squares[id(optimizer)] = squares

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit = self._fit
        if fit is None:
            return
        if fit.window is not None:
            images = fit.left_out.run(_IMAGES, math.nan, self._images, trainer, batch)
            fit.left_out.run(_TIMES, None, fit.window.end_step, images)
        logs = self._logs_this_step(trainer, fit)
        self._receive(trainer, fit, wait=logs)
        if logs:
            self._send(trainer, fit)

    def _logs_this_step(self, trainer: Trainer, fit: _Fit) -> bool:
        """The same on every rank: nothing in it is known to one rank only."""
        if (
            trainer.lightning_module.automatic_optimization
            and trainer.fit_loop._should_accumulate()
        ):
            return False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return True
        number = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        return fit.log_every_n_steps > 0 and number % fit.log_every_n_steps == 0

    def _images(self, trainer: Trainer, batch: Any) -> float:
        if not getattr(trainer.strategy, "has_data", True):
            return 0.0
        return float(self.batch_size(batch))

    # -- one row a rank

    def _send(self, trainer: Trainer, fit: _Fit) -> None:
        """Every rank sends a row of one length, whatever failed: the rest of the ranks wait for
        it.
        """
        run, world_size = fit.left_out.run, trainer.world_size
        device = trainer.strategy.root_device
        times = StepTimes.unknown()
        if fit.window is not None:
            times = run(_TIMES, times, fit.window.take, world_size)
        nothing = math.nan, torch.zeros((), dtype=torch.float64)
        skipped, uncounted = (
            run(_SKIPPED, nothing, fit.skipped.count) if fit.skipped is not None else nothing
        )
        memory = run(_MEMORY, RankMemory.unknown(), RankMemory.now, device)
        place = device if is_gpu(device) else torch.device("cpu")
        on_device = run(
            _NORMS,
            torch.full((1 + len(trainer.optimizers),), UNKNOWN, dtype=torch.float64),
            numbers_on_device,
            uncounted,
            [fit.squares.get(id(optimizer)) for optimizer in trainer.optimizers],
            place,
        )
        fit.squares.clear()
        rates, ratios = dict[str, float](), torch.empty(0)
        if trainer.is_global_zero:
            rates = run(_OPTIMIZERS, rates, learning_rates, trainer.optimizers)
            ratios = run(_OPTIMIZERS, ratios, trust_ratios, trainer.optimizers)

        def exchange(comm: Communicator | None) -> RowExchange:
            # the rank may change where others die
            row = RankRow(trainer.global_rank, skipped, times, memory)
            return RowExchange(comm, row, on_device, place)

        fit.pending = LoggedStep(
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            learning_rates=rates,
            trust_ratios=ratios,
            rows=_exchanged(trainer, exchange),
        )

    def _receive(self, trainer: Trainer, fit: _Fit, *, wait: bool) -> None:
        pending = fit.pending
        if pending is None or not (wait or pending.rows.done()):
            return
        fit.pending = None
        pending.rows.wait()
        report = fit.left_out.run(_REPORT, None, pending.report)
        if report is None:
            return
        self.report = report
        if not trainer.is_global_zero:
            return
        scalars = fit.left_out.run(_REPORT, {}, report.scalars)
        algorithm = getattr(trainer.strategy, "algorithm", None)
        if (metrics := getattr(algorithm, "metrics", None)) is not None:
            scalars |= {f"ring/{name}": value for name, value in metrics().items()}
        # what is always 0 gets no chart
        fit.logged.update(name for name, value in scalars.items() if value)
        scalars = {name: value for name, value in scalars.items() if name in fit.logged}
        if (changes := getattr(trainer.strategy, "rank_changes", None)) is not None:
            scalars |= changes.scalars()
        for logger in trainer.loggers if scalars else ():
            # an error in it is the user's to see, as under DDP
            logger.log_metrics(scalars, step=report.step)
        if fit.dashboard is not None:
            fit.left_out.run(_PAGES, None, fit.dashboard.add_histograms, report)
        fit.left_out.run(_BAR, None, _show_on_bar, trainer, report)


def _communicator(trainer: Trainer) -> Communicator | None:
    """`None` also where no rank may wait for another one between two steps: each then has its
    own row.
    """
    algorithm = getattr(trainer.strategy, "algorithm", None)
    if algorithm is not None and not algorithm.steps_together:
        return None
    return getattr(trainer.strategy, "communicator", None)


def _exchanged(
    trainer: Trainer, exchange: Callable[[Communicator | None], RowExchange]
) -> RowExchange:
    """An exchange under way; where ranks may die, one that has ended: all of them have to get
    the same rows.
    """
    call_together = getattr(trainer.strategy, "call_together", None)
    if call_together is None:
        return exchange(_communicator(trainer))
    table = call_together(lambda: exchange(_communicator(trainer)).table())
    rows = exchange(None)
    rows.take(table)
    return rows


class _Fit:
    """What a monitor holds while its Trainer fits. ``window`` or ``skipped`` is `None` where it
    could not be made.
    """

    def __init__(self, trainer: Trainer) -> None:
        # a script may give loggers, and how often to log, to rank 0 alone: all ranks exchange rows
        # when rank 0 logs
        self.log_every_n_steps: int = trainer.strategy.broadcast(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self.left_out = MonitorFailures()
        self.window: StepWindow | None = self.left_out.run(_TIMES, None, StepWindow, trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.skipped: SkippedSteps | None = self.left_out.run(
            _SKIPPED, None, SkippedSteps, trainer.optimizers, scaler
        )
        if getattr(trainer.strategy, "communicator", None) is None and trainer.world_size > 1:
            rank_zero_warn(
                "RingMonitor sees no other rank, and no communication, under "
                f"{type(trainer.strategy).__name__}: what it logs is rank 0's. Use strategy='ring' "
                "or 'ring_sharded' for the rest."
            )
        self.squares: dict[int, Tensor] = {}
        self.pending: LoggedStep | None = None
        self.dashboard: Dashboard | None = None
        self.logged: set[str] = set()

    def close(self) -> None:
        if self.window is not None:
            self.left_out.run(_TIMES, None, self.window.close)
        if self.skipped is not None:
            self.left_out.run(_SKIPPED, None, self.skipped.remove)


def _show_on_bar(trainer: Trainer, report: RingReport) -> None:
    if trainer.progress_bar_callback is not None:
        # where `self.log(..., prog_bar=True)` ends up, for any bar to show; the property of that
        # name would compute the epoch's metrics, with collectives in which no other rank takes part
        trainer._logger_connector._progress_bar_metrics.update(report.bar())  # type: ignore[arg-type]


def add_monitor(trainer: Trainer) -> None:
    """Put a `RingMonitor` before ``trainer``'s callbacks, unless there is one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not trainer.barebones and not any(isinstance(one, RingMonitor) for one in callbacks):
        callbacks.insert(0, RingMonitor())


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
