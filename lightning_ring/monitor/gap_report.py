"""The gap meter's measurements, the cost of a loader, and the part of the pipeline that is the
bottleneck.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

ON_DEVICE, ON_HOST, REPLAYED, REAL = SOURCES = (
    "synthetic on the device",
    "synthetic on the host",
    "replayed",
    "real",
)
SLOW_RANK = 1.25
"""A rank whose own time is this many times that of the others is what a step waits for."""
SMALL_GAP = 0.05


@dataclass(frozen=True, slots=True)
class LoaderCost:
    """Seconds of one rank to make one batch, as one worker after another would take them."""

    reading: float  # waiting for storage
    decoding: float  # decoding and transforms: computing in the data set
    handing_over: float  # collating, and what lies between worker and training loop

    def largest(self) -> str:
        costs = {
            "reading": self.reading,
            "decoding and transforms": self.decoding,
            "handing over": self.handing_over,
        }
        return max(costs, key=lambda name: costs[name])


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured, in seconds."""

    # for each of `SOURCES` the median step, a batch's share of it where gradients accumulate
    step: Mapping[str, float]
    waits: Sequence[float]  # for each step on real data the share of it spent waiting for the batch
    own: float  # median time of forward and backward without any exchange of gradients
    batch_size: int  # images of a step on this rank
    loader: LoaderCost  # what its loader spends on a batch
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
        slow_rank: The rank that the others wait for, if there is one.
        bottleneck: ``"none"``, ``"reading"``, ``"decoding and transforms"``, ``"handing over"``,
            ``"copying to the device"`` or ``"a slow rank"``.
        ranks: What each measured.
    """

    images_per_second: Mapping[str, float]
    gap: float
    wait_p50: float
    wait_p95: float
    waiting_rank: int
    slow_rank: int | None
    bottleneck: str
    ranks: Sequence[RankTimes]

    def verdict(self) -> str:
        """The bottleneck, in one line."""
        if self.bottleneck == "none":
            return f"no bottleneck: real data costs {100 * self.gap:.1f} % of the images per second"
        if self.slow_rank is not None:
            own = [times.own for times in self.ranks]
            others = median([time for rank, time in enumerate(own) if rank != self.slow_rank])
            return (
                f"bottleneck: a slow rank. Rank {self.slow_rank} takes "
                f"{1e3 * own[self.slow_rank]:.1f} ms for forward and backward before any "
                f"collective, the others {1e3 * others:.1f} ms"
            )
        rank = self.ranks[self.waiting_rank]
        step, copying = rank.step, rank.step[ON_HOST] - rank.step[ON_DEVICE]
        costs = rank.loader
        return (
            f"bottleneck: {self.bottleneck}. Of {1e3 * step[REAL]:.1f} ms a step on real data, "
            f"training takes {1e3 * step[ON_DEVICE]:.1f}, copying {1e3 * max(0.0, copying):.1f}; a "
            f"batch costs the loader {1e3 * costs.reading:.1f} ms of reading, "
            f"{1e3 * costs.decoding:.1f} of decoding and transforms, "
            f"{1e3 * costs.handing_over:.1f} of handing over"
        )

    def table(self) -> str:
        """Plain text: images per second a source, the gap, the waiting, the verdict."""
        width = max(len(source) for source in SOURCES)
        rows = [
            f"  {source:<{width}}  {self.images_per_second[source]:>10.1f} images/s"
            for source in SOURCES
        ]
        return "\n".join(
            [
                f"gap meter, {len(self.ranks)} rank(s), {self.ranks[0].batch_size} images a rank "
                "and step",
                *rows,
                f"  gap between synthetic and real: {100 * self.gap:.1f} %",
                f"  share of a step spent waiting for data on rank {self.waiting_rank}: "
                f"p50 {100 * self.wait_p50:.1f} %, p95 {100 * self.wait_p95:.1f} %",
                f"  {self.verdict()}",
            ]
        )


def judge(ranks: Sequence[RankTimes]) -> GapReport:
    """Put the ranks' measurements together.

    A slow rank holds the others up on any data: it is the bottleneck if it costs a step more than
    real data do. Otherwise, if the gap is more than `SMALL_GAP`, it is copying where most of the
    gap opens between the two synthetic sources, else the costliest part of the loader.
    """
    images = sum(times.batch_size for times in ranks)
    speed = {source: images / max(times.step[source] for times in ranks) for source in SOURCES}
    gap = (speed[ON_DEVICE] - speed[REAL]) / speed[ON_DEVICE]
    medians = [_quantile(times.waits, 0.5) for times in ranks]
    waiting = max(range(len(ranks)), key=lambda rank: medians[rank])
    slow = _slow_rank(
        [times.own for times in ranks],
        max(times.step[REAL] - times.step[ON_DEVICE] for times in ranks),
    )
    return GapReport(
        images_per_second=speed,
        gap=gap,
        wait_p50=medians[waiting],
        wait_p95=_quantile(ranks[waiting].waits, 0.95),
        waiting_rank=waiting,
        slow_rank=slow,
        bottleneck="a slow rank" if slow is not None else _bottleneck(gap, ranks[waiting]),
        ranks=ranks,
    )


def _bottleneck(gap: float, rank: RankTimes) -> str:
    if gap <= SMALL_GAP:
        return "none"
    copying = rank.step[ON_HOST] - rank.step[ON_DEVICE]
    if rank.copies and copying > (rank.step[REAL] - rank.step[ON_DEVICE]) / 2:
        return "copying to the device"
    return rank.loader.largest()


def _slow_rank(own: Sequence[float], data: float) -> int | None:
    """``data``: seconds that a step on real data takes more."""
    if len(own) < 2:
        return None
    slowest = max(range(len(own)), key=lambda rank: own[rank])
    others = median([time for rank, time in enumerate(own) if rank != slowest])
    return slowest if own[slowest] > max(SLOW_RANK * others, others + data) else None


def median(values: Sequence[float]) -> float:
    return _quantile(values, 0.5)


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of ``values`` do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def loader_cost(
    loader: Any, batch_size: int, seconds_per_batch: float, num_batches: int = 2
) -> LoaderCost:
    """Make ``num_batches`` of the training loader's data set in this thread, and measure the parts.

    Time in the data set during which this thread ran, or was ready to and waited for a core, is
    decoding and transforms; time that it slept is reading, which waits for storage.
    ``seconds_per_batch`` is the loader's time for a batch that training waits for: the part of it
    that the workers' share of reading, decoding and collating does not explain is handing over. A
    loader that measures itself (``loader.cost()``, as `lightning_ring.data`'s) is believed.
    """
    if hasattr(loader, "cost"):
        reading, decoding, handing_over = loader.cost()
        return LoaderCost(reading, decoding, handing_over)
    dataset: Any = getattr(loader, "dataset", None)
    # an IterableDataset has a __getitem__, which raises; without a batch sampler only the sampler
    # knows the indices
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if (
        not by_index
        or isinstance(dataset, IterableDataset)
        or getattr(loader, "batch_sampler", True) is None
    ):
        return LoaderCost(0.0, 0.0, seconds_per_batch)
    wall = worked = collated = 0.0
    for number in range(num_batches):
        begin, begin_worked = time.perf_counter(), _seconds_ready()
        indices = [(number * batch_size + index) % len(dataset) for index in range(batch_size)]
        at_once = hasattr(dataset, "__getitems__")
        items = dataset.__getitems__(indices) if at_once else [dataset[index] for index in indices]
        wall, worked = wall + time.perf_counter() - begin, worked + _seconds_ready() - begin_worked
        begin = time.perf_counter()
        if isinstance(loader, DataLoader) and loader.collate_fn is not None:
            loader.collate_fn(items)
        collated += time.perf_counter() - begin
    wall, worked, collated = wall / num_batches, worked / num_batches, collated / num_batches
    workers = max(1, getattr(loader, "num_workers", 0))
    explained = (wall + collated) / workers
    return LoaderCost(
        max(0.0, wall - worked), worked, collated + max(0.0, seconds_per_batch - explained)
    )


def _seconds_ready() -> float:
    """Seconds that this thread has run so far, with those that it could have run had a core been
    free (on Linux).
    """
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9
