"""Images in a data set of Hugging Face's ``datasets``, which also reads Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_ring.data.sources.classes import digest, numbered_column
from lightning_ring.errors import ConfigurationError


class HuggingFaceImages:
    """The images of a ``datasets.Dataset``, as a source of `image_loader` (extra ``hugging-face``).

    ``datasets.load_dataset(...)`` opens it, or ``datasets.Dataset.from_parquet(files)``. Its
    ``select``, ``filter`` and ``shuffle`` work; its formats and transforms are not asked: the
    loader decodes.

    Args:
        dataset: A split, map style: a ``datasets.Dataset``.
        image: Column of images: ``datasets.Image``, or encoded images as binary.
        label: Column of labels: ``datasets.ClassLabel``, whole numbers, or names of classes.
        classes: Names of the classes in the order of their numbers. Left out, they are those of the
            ``ClassLabel``, or names are numbered in sorted order.

    Attributes:
        labels: Class number of every image, int32.
        classes: Names of the classes; None if they are not known.
        fingerprint: Equal for equal labels in the same order and the same first and last images.

    Raises:
        ConfigurationError: It is no such data set, or a column is not there or holds something
            else.

    Example:
        ```python
        from datasets import Dataset

        photos = HuggingFaceImages(Dataset.from_parquet("photos/*.parquet"))
        sampler = ShuffledSampler(len(photos))
        loader = image_loader(photos, sampler, 64, crop=RandomResizedCrop(224), transform=None)
        ```
    """

    chunk = 32  # rows that one call takes

    def __init__(
        self,
        dataset: Any,
        image: str = "image",
        label: str = "label",
        *,
        classes: Sequence[str] | None = None,
    ) -> None:
        import datasets

        if not isinstance(dataset, datasets.Dataset):
            raise ConfigurationError(
                f"HuggingFaceImages got {type(dataset).__name__}, expected a datasets.Dataset: one "
                "split, not streamed."
            )
        features = dataset.features
        for column in (image, label):
            if column not in features:
                raise ConfigurationError(
                    f"the data set has the columns {', '.join(features)}, expected {column!r} "
                    "among them."
                )
        try:
            encoded = dataset.select_columns([image]).cast_column(
                image, datasets.Image(decode=False)
            )
            self.dataset = encoded.with_format(None)
            self.image = image
            labels = dataset.select_columns([label]).with_format("arrow")[:][label]
            ends = self.read_many(sorted({0, len(dataset) - 1})) if len(dataset) else []
        except (TypeError, ValueError, KeyError, NotImplementedError) as error:
            raise ConfigurationError(
                f"the column {image!r} is {features[image]}, expected images: datasets.Image, or "
                f"binary. {error}"
            ) from error
        if classes is None and isinstance(features[label], datasets.ClassLabel):
            classes = features[label].names
        self.labels, self.classes = numbered_column(labels, classes, f"the column {label!r}")
        content = np.frombuffer(b"".join(ends), np.uint8)
        self.fingerprint = digest(image, self.labels, self.classes, content)

    def __len__(self) -> int:
        return len(self.labels)

    def read_many(self, indices: Sequence[int]) -> list[bytes]:
        """Encoded images, in the order of ``indices``.

        Raises:
            OSError: The file of an image that is kept as a path cannot be read.
        """
        return [_encoded(row) for row in self.dataset[[int(i) for i in indices]][self.image]]

    def where(self, i: int) -> str:
        """Image ``i`` for an error message."""
        row = self.dataset[int(i)][self.image] or {"path": None}
        return f"image {i} ({row['path'] or 'no path'}) of {len(self)}"


def _encoded(row: dict[str, Any] | None) -> bytes:
    if row is None:
        return b""
    data: bytes | None = row["bytes"]
    if data is not None:
        return data
    with open(row["path"], "rb") as file:
        return file.read()
