"""Where each image is: arrays of one row an image, memory-mapped, so that all processes of a host
share them.

    labels.npy     int32    class number                                           4 bytes an image
    places.npy     uint32   where the image starts in its shard, in blocks of 512 bytes; its length
                            in bytes; the CRC-32 of its bytes                     12
    name_ends.npy  int64    where its name ends in names.txt                       8
    stamps.npy     uint64   of the file that it was packed from, for repacking     8

Tar places every file at a multiple of 512 bytes, so 32 bits reach to 2 TiB in a shard. Which shard
an image is in follows from its number and the manifest.

No damage of an index is read for what was packed. Labels are compared with their SHA-256 when they
are opened, names when the first one is asked for. A damaged place leads to bytes that have not the
CRC-32 of the place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from lightning_ring.data.shards.manifest import Manifest, file_sha256
from lightning_ring.errors import ShardError

BLOCK = 512
NAMES = "names.txt"
# dtype, and values a row
COLUMNS: dict[str, tuple[np.dtype[Any], int]] = {
    "labels": (np.dtype("<i4"), 1),
    "places": (np.dtype("<u4"), 3),
    "name_ends": (np.dtype("<i8"), 1),
    "stamps": (np.dtype("<u8"), 1),
}


class ByteRange(NamedTuple):
    """``size`` bytes from byte ``offset`` of shard number ``shard``, and their CRC-32."""

    shard: int
    offset: int
    size: int
    crc32: int


class ShardIndex:
    """The arrays of the shards in ``root``. Labels are read when it is opened, the rest when it is
    asked for.

    Raises `ShardError`: a file is missing, has another shape, or its labels are not those that were
    packed.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._manifest = manifest
        self._samples = manifest.samples
        self._starts = list(accumulate((shard.samples for shard in manifest.shards), initial=0))
        self.labels = self.column("labels")
        self._check("labels.npy")
        self._places = self.column("places")

    def check_all(self) -> None:
        """Raises `ShardError`: a file of the index is not as it was written; a copy of it would
        be taken for whole.
        """
        for name in self._manifest.files:
            if name.startswith(f"{self._manifest.index}/"):
                self._check(name.removeprefix(f"{self._manifest.index}/"))

    def column(self, name: str) -> npt.NDArray[Any]:
        """One array, mapped read-only.

        Raises `ShardError`: the file is missing, is no such array, or has not one row an image.
        """
        values = self._mapped(f"{name}.npy", partial(np.load, mmap_mode="r"))
        dtype, width = COLUMNS[name]
        shape = (self._samples, width)[: 1 + (width > 1)]
        if values.shape != shape or values.dtype != dtype:
            raise ShardError(
                f"{self._path(name)}.npy holds {values.dtype} of shape {values.shape}, expected "
                f"{dtype} of shape {shape}, one row for each image of the manifest. Restore it, or "
                "pack the images again."
            )
        return values

    @cached_property
    def names(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """All names, a byte between any two, and where each of them ends."""
        ends = self.column("name_ends")
        names = self._mapped(NAMES, partial(np.memmap, dtype=np.uint8, mode="r"))
        self._check("name_ends.npy")
        self._check(NAMES)
        return names, ends

    def _path(self, name: str) -> Path:
        return self._root / self._manifest.index / name

    def _mapped(self, name: str, load: Callable[[Path], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        path = self._path(name)
        try:
            # A plain array over the same mapping: indexing a np.memmap costs several times as much.
            return load(path).view(np.ndarray)
        except (OSError, ValueError, EOFError) as error:
            raise ShardError(
                f"{path} cannot be mapped: {error}. Restore it, or pack the images again."
            ) from None

    def _check(self, name: str) -> None:
        try:
            found = file_sha256(self._path(name))
        except OSError as error:
            raise ShardError(
                f"{self._path(name)} cannot be read: {error.strerror}. Restore it."
            ) from None
        expected = self._manifest.files[f"{self._manifest.index}/{name}"]
        if found != expected:
            raise ShardError(
                f"{self._path(name)} is not as it was packed: it has SHA-256 {found}, expected "
                f"{expected}. Restore it, or pack the images again."
            )

    def __len__(self) -> int:
        return self._samples

    def position(self, i: SupportsIndex) -> int:
        """``i`` counted from 0, where it may count from the end as in a list."""
        i = as_index(i)
        if not -self._samples <= i < self._samples:
            raise IndexError(f"image {i} of {self._samples}")
        return i % self._samples

    def place(self, i: SupportsIndex) -> ByteRange:
        i = self.position(i)
        block, size, crc32 = self._places[i].tolist()
        if not size:  # the CRC-32 of no bytes is 0: a page of zeros would pass for an image
            raise ShardError(
                f"{self._path('places.npy')} is damaged: image {i} has no bytes in it. Restore it."
            )
        return ByteRange(bisect_right(self._starts, i) - 1, block * BLOCK, size, crc32)

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: a path as the image folder or the CSV had it."""
        i = self.position(i)
        names, ends = self.names
        start = int(ends[i - 1]) + 1 if i else 0
        return names[start : int(ends[i])].tobytes().decode("utf-8", "surrogateescape")


def key(number: int) -> str:
    """The name, in its tar and without extension, of the image of that number in the order of
    writing.
    """
    return f"{number:09d}"
