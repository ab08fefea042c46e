"""Packed shards as a map-style data set."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch.utils.data import Dataset

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.shards import ShardFiles, ShardIndex, check_lengths, read_manifest
from lightning_ring.errors import ShardError


class ShardDataset(Dataset[tuple[Any, int]]):
    """The images that ``lightning-ring pack`` wrote to ``root``: ``dataset[i]`` is an image and its
    label.

    Any image is found in constant time. The index is mapped, so the processes of a host share it;
    shards are opened in the process that first reads them. Safe to read from several threads, to
    fork and to pickle (as its path).

    Args:
        root: The folder.
        transform: Called with the uint8 tensor (3 x height x width, RGB) of each image.
        decode: False gives the encoded bytes instead of a tensor, to ``transform`` too.
        generation: Of a set to which images were appended: how many appends to read. Left out, all.
            Later appends do not disturb a data set that is open, nor its copies in workers.

    Attributes:
        labels: Class number of every image: int32, length ``len(dataset)``, mapped read-only. You
            may set another array; it travels with the data set to workers.
        classes: Names of the classes, in the order of their numbers.
        fingerprint: Equal for two data sets that hold the same images, labels, names and order, in
            one generation.
        generation: Appends that are read.

    Raises:
        ShardError: ``root`` holds no finished packing or not this generation, or a file is missing
            or not as long as it was written.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: bool = True,
        generation: int | None = None,
    ) -> None:
        self.root = Path(root).absolute()
        self.transform = transform
        self.decode = decode
        self._open(generation)

    def _open(self, generation: int | None) -> None:
        manifest = read_manifest(self.root, generation)
        if problems := check_lengths(self.root, manifest.shards):
            problems.append("Restore what is missing or damaged, or pack the images again.")
            raise ShardError("\n".join(problems))
        self._index = ShardIndex(self.root, manifest)
        self._files = ShardFiles(self.root, manifest.shards)
        self.labels = self._index.labels
        self.classes = manifest.classes
        self.fingerprint = f"generation {manifest.generation}, {manifest.fingerprint}"
        self.generation = manifest.generation

    def __getstate__(self) -> dict[str, Any]:
        # Neither a copy of the index nor descriptors of this process travel to a spawned worker.
        state = self.__dict__.copy()
        del state["_index"], state["_files"]
        if self.labels is self._index.labels:
            del state["labels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open(state["generation"])
        if self.fingerprint != state["fingerprint"]:
            raise ShardError(
                f"{self.root} was packed anew since this data set was opened. Start the job again."
            )
        self.__dict__.update(state)  # labels and classes that the user has changed

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: SupportsIndex) -> tuple[Any, int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[tuple[Any, int]]:
        """One sample for each of ``indices``; torch's DataLoader asks for a batch this way."""
        return [
            self._sample(i, data) for i, data in zip(indices, self.read_many(indices), strict=True)
        ]

    def read(self, i: SupportsIndex) -> bytes:
        """Image ``i`` as it lies in its shard: a JPEG, or a PNG or WebP that was small already.
        Releases the GIL.

        Raises `ShardError`: its bytes are not those that were packed, by their CRC-32, or cannot be
        read.
        """
        return self.read_many([i])[0]

    def read_many(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """`read` for each of ``indices``: the disk is asked for all of them before the first is
        waited for.
        """
        places = [self._index.place(i) for i in indices]
        self._files.will_need(places)
        images = []
        for i, place in zip(indices, places, strict=True):
            data = self._files.read(place)
            if (found := zlib.crc32(data)) != place.crc32:
                raise ShardError(
                    f"{self.where(i)}: its bytes are not those that were packed: CRC-32 "
                    f"{found:08x}, expected {place.crc32:08x}. `lightning-ring pack --verify "
                    f"{self.root}` finds everything that is damaged."
                )
            images.append(data)
        return images

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: its path in the image folder or in the CSV."""
        return self._index.name(i)

    def where(self, i: SupportsIndex) -> str:
        """Image ``i`` for an error message: its file, offset and name."""
        place = self._index.place(i)
        path = self._files.path(place.shard)
        try:
            name = self.name(i)
        except ShardError:
            name = "its name is damaged"
        return (
            f"image {range(len(self))[i]} ({name}), {path} at offset {place.offset}, "
            f"{place.size} bytes"
        )

    def _sample(self, i: SupportsIndex, data: bytes) -> tuple[Any, int]:
        image: Any = data
        if self.decode:
            try:
                image = torch.from_numpy(decode_rgb(data)).permute(2, 0, 1)
            except (ValueError, OSError) as error:
                raise ShardError(
                    f"{self.where(i)}, cannot be decoded: {error}. `lightning-ring pack --verify "
                    f"{self.root}` finds everything that is damaged."
                ) from error
        return image if self.transform is None else self.transform(image), int(self.labels[i])
