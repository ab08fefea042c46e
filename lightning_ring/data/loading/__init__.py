"""Batches: decoded and cropped by threads of this process, finished on the device."""

from lightning_ring.data.loading.batch_maker import LoaderTimes
from lightning_ring.data.loading.build import image_loader, item_loader
from lightning_ring.data.loading.crops import CenterCrop, Crop, RandomResizedCrop
from lightning_ring.data.loading.device import DeviceTransform
from lightning_ring.data.loading.folder import ImageFolder
from lightning_ring.data.loading.images import ImageBatches, ImageSource
from lightning_ring.data.loading.items import ItemBatches
from lightning_ring.data.loading.loader import Loader

__all__ = [
    "CenterCrop",
    "Crop",
    "DeviceTransform",
    "ImageBatches",
    "ImageFolder",
    "ImageSource",
    "ItemBatches",
    "Loader",
    "LoaderTimes",
    "RandomResizedCrop",
    "image_loader",
    "item_loader",
]
