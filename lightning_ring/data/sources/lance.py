"""Images in a Lance data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_ring.data.sources.classes import digest, numbered_column
from lightning_ring.errors import ConfigurationError, ShardLostError


class LanceImages:
    """The images of an open Lance data set, as a source of `image_loader` (extra ``lance``).

    ``lance.dataset(uri, version=..., storage_options=...)`` opens it: a folder, or ``s3://``,
    ``gs://``, ``az://``. It stays at the version that was opened until ``cleanup_old_versions``.

    Args:
        dataset: A ``lance.LanceDataset``.
        image: Column of encoded images (JPEG, PNG, ...): binary, no blobs.
        label: Column of labels: whole numbers, or names of classes.
        where: SQL over the columns: only rows for which it is true. It reads no image.
        classes: Names of the classes in the order of their numbers. Left out, names are numbered in
            sorted order.

    Attributes:
        labels: Class number of every image, int32.
        classes: Names of the classes; None if they are not known.
        fingerprint: Equal for the same rows of the same version, also of a copy.

    Raises:
        ConfigurationError: A column is not there or holds something else, or no row is left.

    Example:
        ```python
        import lance

        photos = LanceImages(lance.dataset("photos.lance", version=7), where="width > 300")
        sampler = ShuffledSampler(len(photos))
        loader = image_loader(photos, sampler, 64, crop=RandomResizedCrop(224), transform=None)
        ```
    """

    chunk = 32  # rows that one call takes: 8 cost 15 % of the images a CPU-second

    def __init__(
        self,
        dataset: Any,
        image: str = "image",
        label: str = "label",
        *,
        where: str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.dataset = dataset
        self.image = image
        shown = f"{dataset.uri}, version {dataset.version}"
        wanted = {"label": f"`{label}`", "kept": "true" if where is None else where}
        try:
            field = dataset.schema.field(image)
            table = dataset.to_table(columns=wanted)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"{shown}, with the columns {', '.join(dataset.schema.names)}, cannot be read with "
                f"image={image!r}, label={label!r}, where={where!r}: {error}"
            ) from error
        metadata = field.metadata or {}
        if str(field.type) not in ("binary", "large_binary") or b"lance-encoding:blob" in metadata:
            raise ConfigurationError(
                f"{shown}: the column {image!r} is of {field.type} {metadata or ''}, expected "
                "binary: encoded images, not stored as blobs."
            )
        kept = table["kept"]
        if str(kept.type) != "bool":
            raise ConfigurationError(
                f"where={where!r} is {kept.type}, expected a condition, true or false."
            )
        kept = kept.fill_null(False)
        self._rows = None if where is None else np.flatnonzero(kept.to_numpy())
        table = table.filter(kept)
        what = f"{shown}: the column {label!r}"
        self.labels, self.classes = numbered_column(table["label"], classes, what)
        files = [str(fragment.metadata.to_json()) for fragment in dataset.get_fragments()]
        content = digest(files, image, self._rows, self.labels, self.classes)
        self.fingerprint = f"version {dataset.version}, {content}"

    def __len__(self) -> int:
        return len(self.labels)

    def read_many(self, indices: Sequence[int]) -> list[bytes]:
        """Encoded images, in the order of ``indices``.

        Raises:
            ShardLostError: Lance cannot read them.
        """
        try:
            table = self.dataset.take([self._row(i) for i in indices], columns=[self.image])
        except (OSError, ValueError, RuntimeError) as error:
            raise ShardLostError(
                f"{self.dataset.uri}, version {self.dataset.version}, cannot be read: {error}. If "
                "the version was cleaned up, open a newer one in a new training."
            ) from error
        found: list[bytes] = table[self.image].to_pylist()
        return [b"" if data is None else data for data in found]

    def where(self, i: int) -> str:
        """Image ``i`` for an error message."""
        return (
            f"image {i}: row {self._row(i)} of {self.dataset.uri}, version {self.dataset.version}"
        )

    def _row(self, i: int) -> int:
        return int(i if self._rows is None else self._rows[i])
