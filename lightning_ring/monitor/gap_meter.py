"""How much slower training is on real data than on synthetic, and why."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.monitor.batch_size import first_dimension
from lightning_ring.monitor.failures import MonitorFailures
from lightning_ring.monitor.gap_report import (
    ON_DEVICE,
    REAL,
    REPLAYED,
    SOURCES,
    GapReport,
    LoaderCost,
    RankTimes,
    judge,
    loader_cost,
    median,
)
from lightning_ring.monitor.trainer_snapshot import borrowed


class GapMeter(Callback):
    """Before training starts, runs its own step on four sources of batches in turn, and reports
    their speeds.

    The sources: random images that lie on the device already; the same on the host; real batches
    replayed from memory; and real data from the training loader, warm. They take turns, ``rounds``
    times, in blocks of ``steps`` steps of which the first half warms up (a loader fills its queue
    while the others run) and is not timed. Batches have one shape in all. The optimizer steps as in
    training, with ``accumulate_grad_batches`` after so many batches: a step is then the mean of
    those, and a block goes on until two of them are whole. Afterwards model, optimizer, counters,
    loaders and random states are as before, so that training gives the numbers it gives without the
    meter.

    The result is printed by rank 0 and kept in ``report``.

    Args:
        steps: Batches of a block, at least 4.
        rounds: Blocks of each source, at least 1.
        only: End after the measurement instead of training.
        batch_size: From a batch to its number of images; default `first_dimension`.

    Raises:
        ValueError: ``steps`` or ``rounds`` is too small.
        ConfigurationError: When training starts: there is no optimizer to step.
    """

    def __init__(
        self,
        steps: int = 20,
        rounds: int = 3,
        only: bool = False,
        batch_size: Callable[[Any], int] = first_dimension,
    ) -> None:
        if steps < 4 or rounds < 1:
            raise ValueError(
                f"GapMeter needs steps >= 4 and rounds >= 1, got {steps} and {rounds}."
            )
        self.steps = steps
        self.rounds = rounds
        self.only = only
        self.batch_size = batch_size
        self.report: GapReport | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if pl_module.automatic_optimization and not trainer.optimizers:
            raise ConfigurationError(
                "GapMeter times training steps, and "
                f"{type(pl_module).__name__}.configure_optimizers gave no optimizer to step. "
                "Return one, or leave GapMeter out."
            )
        with borrowed(trainer, pl_module), _loaders_of_its_own(trainer) as loader:
            mine = _Measurement(trainer, pl_module, self.steps, loader, self.batch_size).run(
                self.rounds
            )
        everyone: list[RankTimes] = [mine]
        if trainer.world_size > 1:
            everyone = [None] * trainer.world_size  # type: ignore[list-item]
            torch.distributed.all_gather_object(everyone, mine)
        self.report = judge(everyone)
        rank_zero_only(print)(
            self.report.table(), flush=True
        )  # the launcher's rank 0: a strategy may know of one process
        if self.only:
            trainer.should_stop = True


class _Measurement:
    """The four sources over one Trainer's own step."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        steps: int,
        loader: CombinedLoader,
        batch_size: Callable[[Any], int],
    ) -> None:
        self.trainer, self.module, self.steps, self.loader = trainer, module, steps, loader
        self.real = (batch for _ in repeat(None) for batch, _, _ in iter(loader))
        self.replayed = [next(self.real) for _ in range(4)]
        self.batch_size = batch_size(self.replayed[0])
        self.host = tree_map(_noise, self.replayed[0])
        self.device = self._to_device(self.host)
        self.times: dict[str, list[float]] = {source: [] for source in SOURCES}
        self.waits: list[float] = []
        self.fetches: list[float] = []
        self.own: list[float] = []
        # Lightning steps at the end of an epoch, too, however many batches it has accumulated by
        # then
        self.accumulated = min(
            trainer.accumulate_grad_batches, int(min(trainer.num_training_batches, 2**31))
        )

    def run(self, rounds: int) -> RankTimes:
        for _ in range(rounds):
            for source in SOURCES:
                self._block(source)
            self._block_alone()
        loader, fetching = self.loader.flattened[0], median(self.fetches)
        unknown = LoaderCost(0.0, 0.0, fetching)  # as of a loader that cannot be asked
        return RankTimes(
            step={source: median(times) for source, times in self.times.items()},
            waits=self.waits,
            own=median(self.own),
            batch_size=self.batch_size,
            loader=MonitorFailures().run(
                "loader's cost", unknown, loader_cost, loader, self.batch_size, fetching
            ),
            copies=self.module.device.type != "cpu",
        )

    def _block(self, source: str) -> None:
        """Steps of the optimizer on one source; the second half of them counts."""
        steps = max(2, -(-self.steps // self.accumulated))
        for step in range(steps):
            begin, fetching = time.perf_counter(), 0.0
            for number in range(self.accumulated):
                fetching += self._train_batch(source, step * self.accumulated + number)
            seconds = time.perf_counter() - begin
            if step < steps // 2:
                continue
            self.times[source].append(seconds / self.accumulated)
            if source == REAL:
                self.waits.append(fetching / seconds)
                self.fetches.append(fetching / self.accumulated)

    def _train_batch(self, source: str, number: int) -> float:
        """Seconds spent waiting for the batch."""
        begin = time.perf_counter()
        batch = self._batch(source, number)
        fetched = time.perf_counter()
        self._train(
            batch if source == ON_DEVICE else self._to_device(batch), number % self.accumulated
        )
        self._wait_for_device()
        return fetched - begin

    def _block_alone(self) -> None:
        """Forward and backward without gradients travelling: a rank's own time, whoever it would
        wait for.
        """
        with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
            for _ in range(max(2, self.steps // 4)):
                begin = time.perf_counter()
                if self.module.automatic_optimization:
                    loss = self._forward(self.device)
                    call._call_strategy_hook(
                        self.trainer, "backward", loss, self.trainer.optimizers[0]
                    )
                else:
                    self._train(self.device, 0)
                self._wait_for_device()
                self.own.append(time.perf_counter() - begin)
        for param in self.module.parameters():
            param.grad = None

    def _batch(self, source: str, number: int) -> Any:
        if source == REAL:
            return next(self.real)
        if source == REPLAYED:
            return self.replayed[number % len(self.replayed)]
        return self.device if source == ON_DEVICE else self.host

    def _train(self, batch: Any, batch_idx: int) -> None:
        """``batch_idx`` counts from the optimizer's last step."""
        loop = self.trainer.fit_loop.epoch_loop
        kwargs = loop._build_kwargs(OrderedDict(), batch, batch_idx)
        if self.module.automatic_optimization:
            # by these Lightning knows whether to step
            loop.batch_progress.current.ready = batch_idx + 1
            loop.batch_progress.is_last_batch = False
            loop.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, kwargs)
        else:
            loop.manual_optimization.run(kwargs)

    def _forward(self, batch: Any) -> Tensor:
        kwargs = self.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        loss = output["loss"] if isinstance(output, dict) else output
        assert isinstance(loss, Tensor)
        return loss

    def _to_device(self, batch: Any) -> Any:
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    def _wait_for_device(self) -> None:
        if is_gpu(self.module.device):
            gpu_module(self.module.device).synchronize(self.module.device)


@contextmanager
def _loaders_of_its_own(trainer: Trainer) -> Iterator[CombinedLoader]:
    """The training loaders under iterators of their own: those that the first epoch will use
    exist already.
    """
    theirs = trainer.fit_loop._combined_loader
    assert theirs is not None
    persistent = [
        (loader, loader._iterator)
        for loader in theirs.flattened
        if isinstance(loader, DataLoader) and loader.persistent_workers
    ]
    for loader, _ in persistent:
        loader._iterator = None
    mine = CombinedLoader(theirs.iterables, theirs._mode)
    try:
        yield mine
    finally:
        mine.reset()
        for loader, iterator in persistent:
            loader._iterator = iterator


def _noise(leaf: Any) -> Any:
    """Random pixels for what looks like images, everything else (labels) as it is."""
    if not isinstance(leaf, Tensor) or leaf.ndim < 3:
        return leaf
    if leaf.is_floating_point():
        noise = torch.rand_like(leaf)
    elif leaf.dtype == torch.uint8:
        noise = torch.randint_like(leaf, 256)
    else:
        return leaf
    return noise.pin_memory() if leaf.is_pinned() else noise
