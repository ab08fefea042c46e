"""What a batch costs the loader: reading, decoding and transforms, handing over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_ring.monitor.gap_report import LoaderCost


def loader_cost(loader: Any, batch_size: int, seconds_per_batch: float, num_batches: int = 2) -> LoaderCost:
    """Make a few batches of ``loader``'s data set in this thread, and look at what each part takes.

    Time in the data set during which this thread ran, or was ready to and waited for a core, is decoding and
    transforms; time that it slept is reading: storage is waited for, everything else computes. A loader that measures
    itself (``loader.cost()``, as `lightning_ring.data`'s does) is believed.

    Args:
        loader: The training loader.
        batch_size: Images of one batch.
        seconds_per_batch: What the loader took for a batch when training waited for it: what its workers' share of
            reading, decoding and collating does not explain of it is handing over.
        num_batches: Batches made.
    """
    if hasattr(loader, "cost"):
        reading, decoding, handing_over = loader.cost()
        return LoaderCost(reading, decoding, handing_over)
    dataset = getattr(loader, "dataset", None)
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not _is_iterable(dataset)
    if (
        dataset is None or not by_index or getattr(loader, "batch_sampler", True) is None
    ):  # or its indices are the sampler's alone to know
        return LoaderCost(0.0, 0.0, seconds_per_batch)
    wall = worked = collated = 0.0
    for number in range(num_batches):
        begin, begin_worked = time.perf_counter(), _seconds_ready()
        items = _items(dataset, [(number * batch_size + index) % len(dataset) for index in range(batch_size)])
        wall, worked = wall + time.perf_counter() - begin, worked + _seconds_ready() - begin_worked
        begin = time.perf_counter()
        if isinstance(loader, DataLoader) and loader.collate_fn is not None:
            loader.collate_fn(items)
        collated += time.perf_counter() - begin
    wall, worked, collated = wall / num_batches, worked / num_batches, collated / num_batches
    workers = max(1, getattr(loader, "num_workers", 0))
    explained = (wall + collated) / workers
    return LoaderCost(max(0.0, wall - worked), worked, collated + max(0.0, seconds_per_batch - explained))


def _is_iterable(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset)  # it has a __getitem__, which raises, and may have a length


def _seconds_ready() -> float:
    """Seconds that this thread has run so far, with those that it could have run had a core been free (on Linux)."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


def _items(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]
