"""All ranks read the same generation of a set of images: one may have been appended while they started."""

from __future__ import annotations

from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError


def check_same_images(dataloader: Any, comm: Communicator) -> None:
    """Compare the sets that the loaders of `image_loader` read. Collective for those, nothing for others.

    Raises `ConfigurationError`: on every rank, if two of them read different images.
    """
    generations = getattr(dataloader, "generations", None)
    if generations is None:
        return
    mine = generations.generation, dataloader.sampler.fingerprint
    found: list[Any] = comm.all_gather_object(mine, name="images of a loader")
    if other := next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None):
        shown = [f"rank {rank} reads generation {found[rank][0]} ({found[rank][1][:12]})" for rank in (0, other)]
        raise ConfigurationError(
            f"ranks read different images: {', '.join(shown)}. A set may have changed while they started. Start the "
            "job again, or name the generation: ShardDataset(..., generation=N)."
        )
