"""How much slower training is on real data than on synthetic, and which part of the pipeline is the
bottleneck.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import synchronize
from lightning_ring.monitor.ring_monitor import MonitorFailures, first_dimension

ON_DEVICE, ON_HOST, REPLAYED, REAL = SOURCES = (
    "synthetic on the device",
    "synthetic on the host",
    "replayed",
    "real",
)
SMALL_GAP = 0.05


LoaderCost = tuple[float, float, float]
"""Seconds of one rank to make one batch, as one worker after another would take them: waiting for
storage; computing in the data set; collating, and what lies between worker and training loop."""
_PARTS = ("reading", "decoding and transforms", "handing over")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured, in seconds."""

    # images of a step on this rank
    batch_size: int
    # what its loader spends on a batch
    loader: LoaderCost
    # for each of `SOURCES` the median step, a batch's share of it where gradients accumulate
    step: Mapping[str, float]
    # for each step on real data the share of it spent waiting for the batch
    waits: Sequence[float]
    # whether a batch has to be copied to the device: on the CPU the two synthetic sources are one
    copies: bool = True


@dataclass(frozen=True, slots=True)
class GapReport:
    """The result, the same on every rank.

    Attributes:
        images_per_second: For each of `SOURCES`, over all ranks.
        gap: (synthetic - real) / synthetic in images per second, synthetic being that on the
            device.
        wait_p50, wait_p95: Share of a step on real data spent waiting for the batch, on the rank
            that waits longest.
        waiting_rank: That rank.
        bottleneck: ``"none"``, ``"reading"``, ``"decoding and transforms"``, ``"handing over"`` or
            ``"copying to the device"``.
        ranks: What each measured.
    """

    images_per_second: Mapping[str, float]
    gap: float
    wait_p50: float
    wait_p95: float
    waiting_rank: int
    bottleneck: str
    ranks: Sequence[RankTimes]

    def verdict(self) -> str:
        """The bottleneck, in one line."""
        if self.bottleneck == "none":
            return f"no bottleneck: real data costs {100 * self.gap:.1f} % of the images per second"
        rank = self.ranks[self.waiting_rank]
        step, (reading, decoding, handing_over) = rank.step, rank.loader
        copying = max(0.0, step[ON_HOST] - step[ON_DEVICE])
        return (
            f"bottleneck: {self.bottleneck}. Of {1e3 * step[REAL]:.1f} ms a step on real data, "
            f"training takes {1e3 * step[ON_DEVICE]:.1f}, copying {1e3 * copying:.1f}; a batch "
            f"costs the loader {1e3 * reading:.1f} ms of reading, {1e3 * decoding:.1f} of decoding "
            f"and transforms, {1e3 * handing_over:.1f} of handing over"
        )

    def table(self) -> str:
        """Plain text: images per second a source, the gap, the waiting, the verdict."""
        speeds = self.images_per_second.items()
        lines = [
            f"gap meter, {len(self.ranks)} rank(s), {self.ranks[0].batch_size} images a rank and "
            "step",
            *(f"{source:<23}  {speed:>10.1f} images/s" for source, speed in speeds),
            f"gap between synthetic and real: {100 * self.gap:.1f} %",
            f"share of a step spent waiting for data on rank {self.waiting_rank}: "
            f"p50 {100 * self.wait_p50:.1f} %, p95 {100 * self.wait_p95:.1f} %",
            self.verdict(),
        ]
        return "\n  ".join(lines)


def judge(ranks: Sequence[RankTimes]) -> GapReport:
    """Put the ranks' measurements together.

    If the gap is more than `SMALL_GAP`, the bottleneck is copying where most of the gap opens
    between the two synthetic sources, else the costliest part of the loader.
    """
    images = sum(times.batch_size for times in ranks)
    speed = {source: images / max(times.step[source] for times in ranks) for source in SOURCES}
    gap = (speed[ON_DEVICE] - speed[REAL]) / speed[ON_DEVICE]
    waits = [sorted(times.waits) for times in ranks]
    longest = max(waits, key=lambda shares: shares[len(shares) // 2])
    waiting = waits.index(longest)
    p50, p95 = longest[len(longest) // 2], longest[int(0.95 * len(longest))]
    return GapReport(speed, gap, p50, p95, waiting, _bottleneck(gap, ranks[waiting]), ranks)


def _bottleneck(gap: float, rank: RankTimes) -> str:
    if gap <= SMALL_GAP:
        return "none"
    step = rank.step
    if rank.copies and step[ON_HOST] > (step[REAL] + step[ON_DEVICE]) / 2:
        return "copying to the device"
    return _PARTS[rank.loader.index(max(rank.loader))]


def loader_cost(loader: Any, batch_size: int, seconds_per_batch: float) -> LoaderCost:
    """Make two batches of the training loader's data set in this thread, and measure the parts.

    Time in the data set during which this thread ran, or was ready to and waited for a core, is
    decoding and transforms; time that it slept is reading, which waits for storage.
    ``seconds_per_batch`` is the loader's time for a batch that training waits for: the part of it
    that the workers' share of reading, decoding and collating does not explain is handing over. A
    loader that measures itself (``loader.cost()``, as `lightning_ring.data`'s) is believed.
    """
    if hasattr(loader, "cost"):
        cost: LoaderCost = loader.cost()
        return cost
    # an IterableDataset has a __getitem__, which raises; without a batch sampler only the sampler
    # knows the indices
    by_index = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    if not by_index or isinstance(dataset := loader.dataset, IterableDataset):
        return 0.0, 0.0, seconds_per_batch
    wall = worked = collated = 0.0
    for number in range(2):
        begin, ready = time.perf_counter(), _seconds_ready()
        indices = [(number * batch_size + index) % len(dataset) for index in range(batch_size)]
        if hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(indices)
        else:
            items = [dataset[index] for index in indices]
        read = time.perf_counter()
        wall += (read - begin) / 2
        worked += (_seconds_ready() - ready) / 2
        loader.collate_fn(items)
        collated += (time.perf_counter() - read) / 2
    explained = (wall + collated) / max(1, loader.num_workers)
    handing_over = collated + max(0.0, seconds_per_batch - explained)
    return max(0.0, wall - worked), worked, handing_over


def _seconds_ready() -> float:
    """Seconds that this thread has run so far, with those that it could have run had a core been
    free (on Linux).
    """
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class GapMeter(Callback):
    """Instead of training, runs the Trainer's own step on four sources of batches in turn, reports
    their speeds, and ends the fit.

    The sources: random images that lie on the device already; the same on the host; real batches
    replayed from memory; and real data from the training loader, warm. They take turns, ``rounds``
    times, in blocks of ``steps`` steps of which the first half warms up (a loader fills its queue
    while the others run) and is not timed. Batches have one shape in all. The optimizer steps as in
    training, with ``accumulate_grad_batches`` after so many batches: a step is then the mean of
    those, and a block goes on until two of them are whole. The model has learned noise afterwards.

    The result is printed by rank 0 and kept in ``report``.

    Args:
        steps: Batches of a block, at least 4.
        rounds: Blocks of each source, at least 1.
        batch_size: From a batch to its number of images; default `first_dimension`.

    Raises:
        ValueError: ``steps`` or ``rounds`` is too small.
        ConfigurationError: When training starts: there is no optimizer to step.
    """

    def __init__(
        self,
        steps: int = 20,
        rounds: int = 3,
        batch_size: Callable[[Any], int] = first_dimension,
    ) -> None:
        if steps < 4 or rounds < 1:
            raise ValueError(
                f"GapMeter needs steps >= 4 and rounds >= 1, got {steps} and {rounds}."
            )
        self.steps = steps
        self.rounds = rounds
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
        # an iteration of its own: Lightning has begun that of the first epoch
        theirs: Any = trainer.fit_loop._combined_loader
        loader = CombinedLoader(theirs.iterables, theirs._mode)
        measurement = _Measurement(trainer, pl_module, self.steps, loader)
        mine = measurement.run(self.rounds, self.batch_size)
        loader.reset()
        everyone: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(everyone, mine)
        self.report = judge(everyone)
        # the launcher's rank 0: a strategy may know of one process
        rank_zero_only(print)(self.report.table(), flush=True)
        trainer.fit_loop.max_epochs = 0


class _Measurement:
    """The four sources over one Trainer's own step."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, steps: int, loader: CombinedLoader
    ) -> None:
        self.trainer, self.module, self.steps, self.loader = trainer, module, steps, loader
        real = (batch for _ in repeat(None) for batch, _, _ in iter(loader))
        replayed = [next(real) for _ in range(4)]
        self.first = replayed[0]
        synthetic = tree_map(_noise, self.first)
        self.sources: dict[str, Iterator[Any]] = {
            ON_DEVICE: repeat(self._to_device(synthetic)),
            ON_HOST: repeat(synthetic),
            REPLAYED: cycle(replayed),
            REAL: real,
        }
        self.times: dict[str, list[float]] = defaultdict(list)
        self.waits: list[float] = []
        self.fetches: list[float] = []
        # Lightning steps at the end of an epoch, too, however many batches it has accumulated by
        # then
        self.accumulated = int(min(trainer.accumulate_grad_batches, trainer.num_training_batches))

    def run(self, rounds: int, count: Callable[[Any], int]) -> RankTimes:
        for _ in range(rounds):
            for source in SOURCES:
                self._block(source)
        batch_size, fetching = count(self.first), median(self.fetches)
        # as of a loader that cannot be asked
        unknown = 0.0, 0.0, fetching
        arguments = self.loader.flattened[0], batch_size, fetching
        cost = MonitorFailures().run("loader's cost", unknown, loader_cost, *arguments)
        steps = {source: median(times) for source, times in self.times.items()}
        return RankTimes(batch_size, cost, steps, self.waits, self.module.device.type != "cpu")

    def _block(self, source: str) -> None:
        """Steps of the optimizer on one source; the second half of them counts."""
        steps = max(2, -(-self.steps // self.accumulated))
        for step in range(steps):
            begin, fetching = time.perf_counter(), 0.0
            for number in range(self.accumulated):
                before = time.perf_counter()
                batch = next(self.sources[source])
                fetching += time.perf_counter() - before
                self._train(batch if source == ON_DEVICE else self._to_device(batch), number)
                synchronize(self.module.device)
            seconds = time.perf_counter() - begin
            if step < steps // 2:
                continue
            self.times[source].append(seconds / self.accumulated)
            if source == REAL:
                self.waits.append(fetching / seconds)
                self.fetches.append(fetching / self.accumulated)

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

    def _to_device(self, batch: Any) -> Any:
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)


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
