"""The training sampler of an elastic fit: one order for all ranks, however many there are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from typing import Any, cast

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ring.data.sampling.sampler import ShuffledSampler


def warn_of_fixed_samplers(loaders: Iterable[Any], rank: int, world_size: int) -> None:
    """Name the validation loaders that were cut for other ranks than there are now, and so miss
    or repeat samples.
    """
    for number, loader in enumerate(loaders):
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or (sampler.rank, sampler.num_replicas) == (
            rank,
            world_size,
        ):
            continue
        warnings.warn(
            f"lightning_ring: ranks have changed, and validation loader {number} of rank {rank} "
            f"of {world_size} goes on with its DistributedSampler of rank {sampler.rank} of "
            f"{sampler.num_replicas}: validations leave samples out or count them twice. Give the "
            "loader no DistributedSampler (Lightning puts one in, for the ranks that there are), "
            "or make it in val_dataloader(), which is called again.",
            stacklevel=2,
        )


def with_ordered_sampler(loader: Any) -> Any:
    """``loader``, with a `ShuffledSampler` in place of torch's `DistributedSampler`, which
    Lightning puts in.

    torch's sampler cuts an epoch for a fixed number of ranks.
    """
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is not DistributedSampler or not isinstance(loader, DataLoader):
        return loader
    own = ShuffledSampler(
        len(cast(Sized, sampler.dataset)),
        shuffle=sampler.shuffle,
        remainder="drop" if sampler.drop_last else "repeat",
        seed=sampler.seed,
    )
    rank_zero_info(
        "lightning_ring: the training loader's DistributedSampler is replaced by "
        "lightning_ring.data.ShuffledSampler, whose order does not depend on the number of ranks."
    )
    return _update_dataloader(loader, own, mode=RunningStage.TRAINING)
