"""Loaders of images, and of anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from lightning_ring.data.loading.crops import Crop
from lightning_ring.data.loading.device import DeviceTransform
from lightning_ring.data.loading.images import ImageBatches, ImageSource
from lightning_ring.data.loading.items import ItemBatches
from lightning_ring.data.loading.loader import Loader
from lightning_ring.data.sampling.sampler import OrderedSampler


def image_loader(
    source: ImageSource,
    sampler: OrderedSampler,
    batch_size: int | None = None,
    *,
    crop: Crop,
    transform: DeviceTransform | None,
    device: torch.device | str = "cpu",
    with_indices: bool = False,
    drop_last: bool = False,
    num_threads: int | None = None,
    ranks_per_node: int = 1,
    prefetch: int = 2,
) -> Loader:
    """Batches ``(images, labels)`` of a `ShardDataset`, an `ImageFolder`, or another `ImageSource`.

    Args:
        source, crop, transform, device, with_indices: See `ImageBatches`.
        sampler: Of this rank.
        batch_size: Images of this rank and step; `PKSampler` knows its own.
        drop_last: Leave out a last batch that is smaller.
        num_threads: That decode. Left out: the cores that this process may use, divided by ``ranks_per_node``.
        ranks_per_node: Ranks that share those cores.
        prefetch: Batches that are filled while one is trained on.
    """
    maker = ImageBatches(source, crop, transform, device, with_indices)
    return Loader(
        maker,
        sampler,
        batch_size,
        drop_last=drop_last,
        num_threads=num_threads,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
    )


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
    """Batches of any map-style torch data set. Arguments as for `image_loader`; see also `ItemBatches`."""
    return Loader(
        ItemBatches(dataset, collate),
        sampler,
        batch_size,
        drop_last=drop_last,
        num_threads=num_threads,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
    )
