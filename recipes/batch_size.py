"""Images of a step, over ranks."""

from __future__ import annotations

from lightning_ring.errors import ConfigurationError


def per_rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """Images per rank and step, so that ``global_batch_size`` images make one step on any number of
    ranks.

    Raises:
        ConfigurationError: ``global_batch_size`` is not a positive multiple of ``world_size``.
    """
    if global_batch_size <= 0 or global_batch_size % world_size:
        lower = global_batch_size // world_size * world_size
        nearest = " or ".join(str(size) for size in (lower, lower + world_size) if size > 0)
        raise ConfigurationError(
            f"data.batch_size={global_batch_size} is the batch of one step over all {world_size} "
            f"ranks and must be a positive multiple of {world_size}. Set data.batch_size to "
            f"{nearest}, or change the number of ranks."
        )
    return global_batch_size // world_size


def classes_per_batch(global_batch_size: int, world_size: int, images_per_class: int) -> int:
    """P of P x K sampling, on each rank.

    Raises:
        ConfigurationError: A rank's batch is no multiple of ``images_per_class``.
    """
    rank_batch_size = per_rank_batch_size(global_batch_size, world_size)
    if rank_batch_size % images_per_class:
        raise ConfigurationError(
            f"data.batch_size={global_batch_size} gives each rank {rank_batch_size} images, which "
            f"are not a multiple of data.images_per_class={images_per_class}. Change one of them."
        )
    return rank_batch_size // images_per_class
