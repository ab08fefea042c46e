"""All ranks read the same images: some may have been appended while ranks started."""

from __future__ import annotations

from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError


def check_same_images(dataloader: Any, comm: Communicator) -> None:
    """Compare the sets that the loaders of `image_loader` read. Collective for those, nothing for
    others.

    Raises `ConfigurationError`: on every rank, if two of them read different images.
    """
    if getattr(dataloader, "images", None) is None:
        return
    mine = dataloader.images, dataloader.sampler.fingerprint
    found: list[Any] = comm.all_gather_object(mine, name="images of a loader")
    if other := next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None):
        shown = [
            f"rank {rank} reads {found[rank][0]!r} in the order of {found[rank][1]!r}"
            for rank in (0, other)
        ]
        raise ConfigurationError(
            f"ranks read different images: {', '.join(shown)}. A set may have changed while they "
            "started. Start the job again, or name the state of the set: ShardDataset(..., "
            "generation=N)."
        )
