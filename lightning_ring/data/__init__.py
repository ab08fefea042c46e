"""Images for training: packed into shards, read back, sampled, decoded, and brought to the device."""

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
