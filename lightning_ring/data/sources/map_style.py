"""Images of any map-style torch data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_ring.data.decoding import Data, rgb_pixels
from lightning_ring.data.sources.classes import digest, numbered
from lightning_ring.errors import ConfigurationError, SampleError


class MapStyleImages:
    """The images of a torch data set, as a source of `image_loader`; ``dataset[i]`` is an image and
    something else.

    An image is Pillow's, a uint8 tensor (3 x height x width), a uint8 array (height x width x 3),
    or encoded bytes. ``dataset[i]`` runs in the threads of the loader, so it has to be safe to call
    from several. Leave ``ToTensor`` and random transforms out of it: they are the loader's. For
    other samples than images there is `item_loader`.

    Args:
        dataset: Map style, such as ``torchvision.datasets.CIFAR10(root)``.
        labels: Of all images: whole numbers, or names of classes. Left out, they are
            ``dataset.targets``, which data sets of torchvision have.
        classes: Names of the classes in the order of their numbers. Left out, they are
            ``dataset.classes``, if there are any and no labels are given.

    Attributes:
        labels: Class number of every image, int32.
        classes: Names of the classes; None if they are not known.
        fingerprint: Equal for data sets of one class with equal labels in the same order.

    Raises:
        ConfigurationError: There are no labels, or not one for each image.

    Example:
        ```python
        photos = MapStyleImages(torchvision.datasets.CIFAR10("cifar10"))
        sampler = ShuffledSampler(len(photos))
        loader = image_loader(photos, sampler, 64, crop=RandomResizedCrop(32), transform=None)
        ```
    """

    def __init__(
        self,
        dataset: Any,
        labels: Sequence[Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.dataset = dataset
        kind = type(dataset).__name__
        if labels is None:
            labels = getattr(dataset, "targets", None)
            classes = getattr(dataset, "classes", None) if classes is None else classes
        if labels is None or len(labels) != len(dataset):
            found = "no targets" if labels is None else f"{len(labels)} labels"
            raise ConfigurationError(
                f"{kind} has {len(dataset)} images and {found}. Give a label for each: "
                "MapStyleImages(dataset, labels=[...]); of a Subset, [targets[i] for i in "
                "subset.indices]."
            )
        self.labels, self.classes = numbered(labels, classes, f"labels of {kind}")
        self.fingerprint = digest(kind, self.labels, self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def read_many(self, indices: Sequence[int]) -> list[Data]:
        """Images, encoded or as pixels (height x width x 3), in the order of ``indices``.

        Raises:
            SampleError: The data set raises, or gives something else.
        """
        return [self._read(int(i)) for i in indices]

    def _read(self, i: int) -> Data:
        try:
            image = self.dataset[i][0]
            if hasattr(image, "convert"):  # Pillow's
                return rgb_pixels(image)
        except OSError:
            raise
        except Exception as error:  # of the user's class: anything
            raise SampleError(f"{self.where(i)} cannot be had: {error!r}") from error
        if isinstance(image, bytes):
            return image
        is_tensor = isinstance(image, torch.Tensor) and image.dtype == torch.uint8
        pixels = image.permute(1, 2, 0).numpy() if is_tensor and image.ndim == 3 else image
        is_array = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
        if is_array and pixels.ndim == 3 and pixels.shape[2] == 3:
            return np.ascontiguousarray(pixels)
        found = getattr(image, "dtype", type(image).__name__), tuple(getattr(image, "shape", ()))
        raise SampleError(
            f"{self.where(i)} is {found[0]} {found[1]}, expected an image of Pillow, a uint8 "
            "tensor (3 x height x width), a uint8 array (height x width x 3), or encoded bytes. "
            "Leave transforms that make floats out of it."
        )

    def where(self, i: int) -> str:
        """Image ``i`` for an error message."""
        return f"image {i} of {type(self.dataset).__name__}"
