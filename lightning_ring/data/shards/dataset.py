"""Packed shards as a map-style data set."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from operator import index as as_index
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.remote.files import RemoteFiles
from lightning_ring.data.remote.opening import open_remote
from lightning_ring.data.remote.options import Remote, is_url
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.expressions import matching
from lightning_ring.data.shards.files import ShardFiles
from lightning_ring.data.shards.index import BLOCK, ByteRange, ShardIndex
from lightning_ring.data.shards.manifest import check_lengths, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError


class ShardDataset(Dataset[tuple[Any, int]]):
    """The images that ``lightning-ring pack`` wrote to ``root``: ``dataset[i]`` is an image and its label.

    ``root`` is a folder, or a URL to which its files were copied (``s3://bucket/photos``, ``https://...``, ``gs://...``).
    There ranges of shards are read, through a cache on the local disk (see `Remote`; extra ``remote``).

    Any image is found in constant time. The index is mapped, so the processes of a host share it; shards are opened in
    the process that first reads them. Safe to read from several threads, to fork and to pickle (as its path).

    Args:
        root: The folder or the URL.
        transform: Called with the uint8 tensor (3 x height x width, RGB) of each image.
        decode: False gives the encoded bytes instead of a tensor, to ``transform`` too.
        generation: Of a set that has changed: the state of it to read. Left out, the newest one. Later changes of the
            set do not disturb a data set that is open, nor its copies in workers.
        where: An expression over the index, such as ``"width > 300 and class_name != 'other'"``: only images for which
            it is true are in the data set (`lightning_ring.data.shards.expressions`). No image is read for it.
        remote: How to read from a URL.

    Attributes:
        metadata: Columns by name: ``metadata["boxes"][i]`` is what image ``i`` was annotated with.
        labels: Class number of every image: int32, length ``len(dataset)``, mapped read-only. You may set another
            array; it travels with the data set to workers.
        classes: Names of the classes, in the order of their numbers.
        fingerprint: Equal for two data sets that hold the same images, labels, names, metadata and order.
        generation: The state of the set that is read.

    Raises:
        ShardError: ``root`` holds no finished packing or not this generation, or a file is missing or not as long as it
            was written.
        StoreError: The URL cannot be read from.
    """

    labels: npt.NDArray[np.int32]
    classes: list[str]
    fingerprint: str

    def __init__(
        self,
        root: str | PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: bool = True,
        generation: int | None = None,
        where: str | None = None,
        remote: Remote | None = None,
    ) -> None:
        if remote is not None and not is_url(root):
            raise ConfigurationError(f"remote={remote} was given with {root}, which is a folder, expected a URL.")
        self.root = str(root).rstrip("/") if is_url(root) else Path(root).absolute()
        self.remote = remote or Remote()
        self.transform = transform
        self.decode = decode
        self._where = where
        self._open(generation)

    def at(self, generation: int | None) -> ShardDataset:
        """This data set at another generation of the set (None: the newest).

        Raises:
            ConfigurationError: You have set other labels, which are those of this generation.
            ShardError: The set has no such generation.
        """
        if self.labels is not self._own_labels:
            raise ConfigurationError(
                f"labels of {self.root} were set by this program, for generation {self.generation}. Open "
                f"ShardDataset(..., generation={generation}), and set them for it."
            )
        other = copy(self)
        other.__dict__.pop("metadata", None)
        other._open(generation)
        return other

    def _open(self, generation: int | None) -> None:
        self._files: ShardFiles | RemoteFiles
        if isinstance(self.root, str):
            manifest, self._index, self._files = open_remote(self.root, self.remote, generation)
        else:
            manifest = read_manifest(self.root, generation)
            if problems := check_lengths(self.root, manifest.shards):
                problems.append("Restore what is missing or damaged, or pack the images again.")
                raise ShardError("\n".join(problems))
            self._index = ShardIndex(self.root, manifest)
            self._files = ShardFiles(self.root, manifest.shards)
        self._rows = None if self._where is None else matching(self._where, self._index, manifest.classes)
        self.labels = self._own_labels = self._index.labels if self._rows is None else self._index.labels[self._rows]
        self.classes = manifest.classes
        self.fingerprint = manifest.fingerprint if self._rows is None else _of_rows(manifest.fingerprint, self._rows)
        self.generation = manifest.generation

    def __getstate__(self) -> dict[str, Any]:
        # Neither a copy of the index nor descriptors of this process travel to a spawned worker.
        own = ("_index", "_files", "_rows", "_own_labels", "metadata")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        if self.labels is self._own_labels:
            del state["labels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(state["generation"])
        if self.fingerprint != state["fingerprint"]:
            raise ShardError(f"{self.root} was packed anew since this data set was opened. Start the job again.")
        self.__dict__.update(state)  # labels and classes that the user has changed

    def __len__(self) -> int:
        return len(self._index) if self._rows is None else len(self._rows)

    @cached_property
    def metadata(self) -> dict[str, Column]:
        found = self._index.metadata
        return found if self._rows is None else {name: column.take(self._rows) for name, column in found.items()}

    def _row(self, i: SupportsIndex) -> int:
        """The row of image ``i`` in the index."""
        if self._rows is None:
            return self._index.position(i)
        at = as_index(i)
        if not -len(self._rows) <= at < len(self._rows):
            raise IndexError(f"image {at} of {len(self._rows)}")
        return int(self._rows[at])

    def __getitem__(self, i: SupportsIndex) -> tuple[Any, int]:
        return self._sample(i, self.read(i))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[tuple[Any, int]]:
        """One sample for each of ``indices``; torch's DataLoader asks for a batch this way."""
        return [self._sample(i, data) for i, data in zip(indices, self.read_many(indices), strict=True)]

    def read(self, i: SupportsIndex) -> bytes:
        """Image ``i`` as it lies in its shard: a JPEG, or a PNG or WebP that was small already. Releases the GIL.

        Raises `ShardError`: its bytes are not those that were packed, by their CRC-32, or cannot be read.
        """
        return self._read(i, self._index.place(self._row(i)))

    def read_many(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """`read` for each of ``indices``: the disk is asked for all of them before the first is waited for."""
        places = [self._index.place(self._row(i)) for i in indices]
        self._files.will_need(places)
        return [self._read(i, place) for i, place in zip(indices, places, strict=True)]

    @property
    def lookahead(self) -> int:
        """Samples that a loader does well to announce by `will_need` before it reads them: 0 for a folder."""
        return self._files.lookahead

    def will_need(self, indices: Sequence[SupportsIndex]) -> None:
        """Start reading the images at ``indices``, in this order; returns at once."""
        self._files.will_need([self._index.place(self._row(i)) for i in indices])

    def key(self, i: SupportsIndex) -> str:
        """The name of image ``i`` in its tar, and in webdataset (``__key__``); read from the tar."""
        place = self._index.place(self._row(i))
        header = self._files.read(place._replace(offset=place.offset - BLOCK, size=BLOCK))
        return header[:100].split(b".")[0].decode("ascii", "replace")

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: its path in the image folder or in the CSV."""
        return self._index.name(self._row(i))

    def where(self, i: SupportsIndex) -> str:
        """Image ``i`` for an error message: its file, offset and name."""
        place = self._index.place(self._row(i))
        path = self._files.path(place.shard)
        try:
            name = self.name(i)
        except ShardError:
            name = "its name is damaged"
        return f"image {range(len(self))[as_index(i)]} ({name}), {path} at offset {place.offset}, {place.size} bytes"

    def _read(self, i: SupportsIndex, place: ByteRange) -> bytes:
        for turn in range(1 + self._files.more_reads):  # a cache may be damaged, and bytes can change on their way
            data = self._files.read_again(place) if turn else self._files.read(place)
            if (found := zlib.crc32(data)) == place.crc32:
                return data
        raise ShardError(
            f"{self.where(i)}: its bytes are not those that were packed: CRC-32 {found:08x}, expected "
            f"{place.crc32:08x}. {self._how_to_verify}"
        )

    @property
    def _how_to_verify(self) -> str:
        if isinstance(self.root, str):
            return "Compare the object with its SHA-256 in the manifest, and upload it again."
        return f"`lightning-ring pack --verify {self.root}` finds everything that is damaged."

    def _sample(self, i: SupportsIndex, data: bytes) -> tuple[Any, int]:
        image: Any = data
        if self.decode:
            try:
                image = torch.from_numpy(decode_rgb(data)).permute(2, 0, 1)
            except (ValueError, OSError) as error:
                raise ShardError(f"{self.where(i)}, cannot be decoded: {error}. {self._how_to_verify}") from error
        return image if self.transform is None else self.transform(image), int(self.labels[i])


def _of_rows(fingerprint: str, rows: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(fingerprint.encode() + rows.astype("<i8").tobytes()).hexdigest()
