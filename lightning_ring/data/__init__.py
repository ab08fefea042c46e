"""Images for training: packed into shards, read back, sampled, decoded, and brought to the
device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ring.data.loading.batch_maker import LoaderTimes
    from lightning_ring.data.loading.folder import ImageFolder
    from lightning_ring.data.loading.images import image_loader
    from lightning_ring.data.loading.items import item_loader
    from lightning_ring.data.loading.loader import Loader
    from lightning_ring.data.loading.transforms import (
        CenterCrop,
        DeviceTransform,
        RandomResizedCrop,
    )
    from lightning_ring.data.mixture import Mixture
    from lightning_ring.data.sampling.balanced import BalancedSampler
    from lightning_ring.data.sampling.mixture import MixtureSampler
    from lightning_ring.data.sampling.pk import PKSampler
    from lightning_ring.data.sampling.sampler import OrderedSampler, ShuffledSampler
    from lightning_ring.data.shards.dataset import ShardDataset
    from lightning_ring.data.sources.hugging_face import HuggingFaceImages
    from lightning_ring.data.sources.lance import LanceImages
    from lightning_ring.data.sources.map_style import MapStyleImages

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
    "loading.batch_maker": ("LoaderTimes",),
    "loading.transforms": ("CenterCrop", "DeviceTransform", "RandomResizedCrop"),
    "loading.folder": ("ImageFolder",),
    "loading.images": ("image_loader",),
    "loading.items": ("item_loader",),
    "loading.loader": ("Loader",),
    "mixture": ("Mixture",),
    "sampling.balanced": ("BalancedSampler",),
    "sampling.mixture": ("MixtureSampler",),
    "sampling.pk": ("PKSampler",),
    "sampling.sampler": ("OrderedSampler", "ShuffledSampler"),
    "shards.dataset": ("ShardDataset",),
    "sources.hugging_face": ("HuggingFaceImages",),
    "sources.lance": ("LanceImages",),
    "sources.map_style": ("MapStyleImages",),
}


def __getattr__(name: str) -> Any:
    """Imported at first use: packing needs no torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"lightning_ring.data.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
