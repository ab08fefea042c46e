"""The training sampler of an elastic fit: one order for all ranks, however many there are."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ring.data.sampling.sampler import ShuffledSampler


def with_ordered_sampler(loader: Any) -> Any:
    """``loader``, with a `ShuffledSampler` in place of torch's `DistributedSampler`, which Lightning puts in.

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
        "lightning_ring: the training loader's DistributedSampler is replaced by lightning_ring.data.ShuffledSampler, "
        "whose order does not depend on the number of ranks."
    )
    return _update_dataloader(loader, own, mode=RunningStage.TRAINING)
