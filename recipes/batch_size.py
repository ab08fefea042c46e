"""Images of a step, over ranks."""

from lightning_ring.errors import ConfigurationError


def per_rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """Images per rank and step, so that ``global_batch_size`` images make one step on any number of
    ranks. Raises `ConfigurationError`: it is not a positive multiple of ``world_size``.
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


def classes_per_batch(
    global_batch_size: int, world_size: int, images_per_class: int, num_classes: int
) -> int:
    """P of P x K sampling, on each rank. Raises `ConfigurationError`: a rank's batch is no multiple
    of ``images_per_class``, or a step takes more than all ``num_classes``.
    """
    rank_batch_size = per_rank_batch_size(global_batch_size, world_size)
    if rank_batch_size % images_per_class:
        raise ConfigurationError(
            f"data.batch_size={global_batch_size} gives each rank {rank_batch_size} images, which "
            f"are not a multiple of data.images_per_class={images_per_class}. Change one of them."
        )
    classes = rank_batch_size // images_per_class
    if classes * world_size > num_classes:
        most = num_classes // world_size
        largest = most * world_size * images_per_class
        # of one class alone a metric loss learns nothing
        smaller = f"data.batch_size={largest} or " if most > 1 else ""
        raise ConfigurationError(
            f"data.batch_size={global_batch_size} takes {classes * world_size} classes a step, "
            f"because data.sampler=pxk draws data.images_per_class={images_per_class} images of "
            f"each. The training images have {num_classes}. Choose {smaller}data.sampler=balanced."
        )
    return classes


def even_batch_size(num_images: int, world_size: int, batch_size: int) -> int:
    """Smallest size, at least ``batch_size``, that cuts every rank's share of an evaluation into
    equally many batches.

    Shares may differ by one image. A rank with one batch more would wait in a collective that the
    others never call, such as DistributedDataParallel's broadcast of buffers. Raises
    `ConfigurationError`: a rank would have no image.
    """
    if num_images < world_size:
        raise ConfigurationError(
            f"{num_images} images cannot be evaluated on {world_size} ranks: each needs at least "
            "one. Lower trainer.devices, or add images to val and test."
        )
    share, longer = divmod(num_images, world_size)
    while longer and share % batch_size == 0:
        batch_size += 1
    return batch_size
