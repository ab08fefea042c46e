"""Batches of any torch data set: its ``__getitem__`` runs in threads."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch.utils.data import default_collate

from lightning_ring.data.loading.batch_maker import LoaderTimes, Samples
from lightning_ring.data.loading.loader import Loader
from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.errors import SampleError


class ItemBatches:
    """Makes ``collate([dataset[i], ...])``, a whole batch in one thread, on the CPU (Lightning
    moves it).

    Random transforms inside the data set draw from generators that all threads share: they are not
    reproducible.

    Args:
        dataset: Map style, safe to read from several threads. ``__getitems__`` is used where there
            is one.
        collate: Makes a batch of a list of samples.
    """

    chunk: int | None = None
    ahead = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.items = dataset
        self.collate = collate

    def open(self, samples: Samples) -> list[Any]:
        return []

    def fill(self, room: list[Any], offset: int, samples: Samples) -> LoaderTimes:
        began = perf_counter()
        got = self._fetch(samples.indices.tolist())
        fetched = perf_counter()
        try:
            room.append(self.collate(got))
        except Exception as error:
            raise SampleError(
                f"samples {samples.indices.tolist()} make no batch: {error!r}"
            ) from error
        return LoaderTimes(transforming=fetched - began, collating=perf_counter() - fetched)

    def start(self, room: list[Any]) -> Any:
        return room[0]

    def finish(self, started: Any) -> Any:
        return started

    def _fetch(self, indices: list[int]) -> list[Any]:
        index: int | list[int] = indices
        try:
            if hasattr(self.items, "__getitems__"):
                return list(self.items.__getitems__(indices))
            got = []
            for index in indices:
                got.append(self.items[index])
            return got
        except Exception as error:
            what = f"sample {index}" if isinstance(index, int) else f"one of the samples {index}"
            raise SampleError(
                f"{what} of {type(self.items).__name__} cannot be had: {error!r}"
            ) from error


def item_loader(
    dataset: Any,
    sampler: OrderedSampler,
    batch_size: int | None = None,
    *,
    collate: Callable[[list[Any]], Any] = default_collate,
    drop_last: bool = False,
    num_threads: int | None = None,
    ranks_per_node: int = 1,
    prefetch: int = 2,
) -> Loader:
    """Batches of any map-style torch data set. Arguments as for `image_loader`; see also
    `ItemBatches`.
    """
    return Loader(
        ItemBatches(dataset, collate),
        sampler,
        batch_size,
        drop_last=drop_last,
        num_threads=num_threads,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
    )
