"""Images for training: packed into shards, read back, sampled, decoded, and brought to the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ring.data.loading import (
        CenterCrop,
        DeviceTransform,
        ImageFolder,
        Loader,
        LoaderTimes,
        RandomResizedCrop,
        image_loader,
        item_loader,
    )
    from lightning_ring.data.sampling import BalancedSampler, PKSampler, ShuffledSampler
    from lightning_ring.data.shards.dataset import ShardDataset

__all__ = [
    "BalancedSampler",
    "CenterCrop",
    "DeviceTransform",
    "ImageFolder",
    "Loader",
    "LoaderTimes",
    "PKSampler",
    "RandomResizedCrop",
    "ShardDataset",
    "ShuffledSampler",
    "image_loader",
    "item_loader",
]

_HOMES = {
    "lightning_ring.data.sampling": ("BalancedSampler", "PKSampler", "ShuffledSampler"),
    "lightning_ring.data.shards.dataset": ("ShardDataset",),
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: packing needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "lightning_ring.data.loading")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
