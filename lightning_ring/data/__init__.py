"""Images for training: packed into shards, read, sampled, decoded, and moved to the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ring.host import require_posix

if TYPE_CHECKING:
    from lightning_ring.data.loading.images import image_loader
    from lightning_ring.data.loading.loader import Loader, LoaderTimes, item_loader
    from lightning_ring.data.loading.transforms import (
        CenterCrop,
        DeviceTransform,
        RandomResizedCrop,
    )
    from lightning_ring.data.sampling.pk import PKSampler
    from lightning_ring.data.sampling.sampler import OrderedSampler, ShuffledSampler
    from lightning_ring.data.sampling.weighted import BalancedSampler, MixtureSampler
    from lightning_ring.data.shard_dataset import ShardDataset
    from lightning_ring.data.sources.folder import ImageFolder
    from lightning_ring.data.sources.hugging_face import HuggingFaceImages
    from lightning_ring.data.sources.lance import LanceImages
    from lightning_ring.data.sources.map_style import MapStyleImages
    from lightning_ring.data.sources.mixture import Mixture

__all__ = [
    "BalancedSampler",
    "CenterCrop",
    "DeviceTransform",
    "HuggingFaceImages",
    "ImageFolder",
    "LanceImages",
    "Loader",
    "LoaderTimes",
    "MapStyleImages",
    "Mixture",
    "MixtureSampler",
    "OrderedSampler",
    "PKSampler",
    "RandomResizedCrop",
    "ShardDataset",
    "ShuffledSampler",
    "image_loader",
    "item_loader",
]

_HOMES = {
    "loading.images": "image_loader",
    "loading.loader": "Loader LoaderTimes item_loader",
    "loading.transforms": "CenterCrop DeviceTransform RandomResizedCrop",
    "sampling.pk": "PKSampler",
    "sampling.sampler": "OrderedSampler ShuffledSampler",
    "sampling.weighted": "BalancedSampler MixtureSampler",
    "shard_dataset": "ShardDataset",
    "sources.folder": "ImageFolder",
    "sources.hugging_face": "HuggingFaceImages",
    "sources.lance": "LanceImages",
    "sources.map_style": "MapStyleImages",
    "sources.mixture": "Mixture",
}


def __getattr__(name: str) -> Any:
    """Imported at first use: packing needs no torch."""
    for home, names in _HOMES.items():
        if name in names.split():
            require_posix("lightning_ring.data")
            return getattr(import_module(f"lightning_ring.data.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
