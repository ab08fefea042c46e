"""Where each image is: columns of one value an image, memory-mapped, so that all processes of a host share them.

    labels.npy     int32   class number                                              4 bytes an image
    blocks.npy     uint32  where the image starts in its shard, in blocks of 512 bytes   4
    sizes.npy      uint32  bytes of the image                                        4
    name_ends.npy  int64   where its name ends in names.txt                          8
    crc32.npy      uint32  of the image's bytes; read by ``lightning-ring pack --verify`` only

Tar places every file at a multiple of 512 bytes, so 32 bits reach to 2 TiB in a shard. Which shard an image is in
follows from its number and the manifest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ShardError

BLOCK = 512
FOLDER = "index"
NAMES = "names.txt"
DTYPES: dict[str, np.dtype[Any]] = {
    "labels": np.dtype("<i4"),
    "blocks": np.dtype("<u4"),
    "sizes": np.dtype("<u4"),
    "name_ends": np.dtype("<i8"),
    "crc32": np.dtype("<u4"),
}


class ByteRange(NamedTuple):
    """``size`` bytes from byte ``offset`` of shard number ``shard``."""

    shard: int
    offset: int
    size: int


class ShardIndex:
    """The columns of the shards in ``root``. Nothing is read from disk before it is asked for."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self._samples = manifest.samples
        self._starts = list(accumulate((shard.samples for shard in manifest.shards), initial=0))
        self.labels = self.column("labels")
        self._blocks = self.column("blocks")
        self._sizes = self.column("sizes")
        self._name_ends = self.column("name_ends")
        self._names = self._mapped(NAMES, partial(np.memmap, dtype=np.uint8, mode="r"))

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column, mapped read-only.

        Raises `ShardError`: the file is missing, is no such column, or has not one value an image.
        """
        values = self._mapped(f"{name}.npy", partial(np.load, mmap_mode="r"))
        if values.shape != (self._samples,) or values.dtype != DTYPES[name]:
            raise ShardError(
                f"{self._root / FOLDER / name}.npy holds {values.dtype} of shape {values.shape}, expected "
                f"{DTYPES[name]} of shape ({self._samples},), one for each image of the manifest. Restore it, or pack "
                "the images again."
            )
        return values

    def _mapped(self, name: str, load: Callable[[Path], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        path = self._root / FOLDER / name
        try:
            # A plain array over the same mapping: indexing a np.memmap costs several times as much.
            return load(path).view(np.ndarray)
        except (OSError, ValueError, EOFError) as error:
            raise ShardError(f"{path} cannot be mapped: {error}. Restore it, or pack the images again.") from None

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
        return ByteRange(bisect_right(self._starts, i) - 1, int(self._blocks[i]) * BLOCK, int(self._sizes[i]))

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: a path as the image folder or the CSV had it."""
        i = self.position(i)
        start = int(self._name_ends[i - 1]) + 1 if i else 0
        return self._names[start : int(self._name_ends[i])].tobytes().decode("utf-8", "surrogateescape")


def key(i: int) -> str:
    """The name that image ``i`` has in its tar, without extension."""
    return f"{i:09d}"
