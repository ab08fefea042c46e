"""One shard as it is written: tar members in WebDataset's layout, and what the index has to know of them."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from array import array
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_ring.data.shards.index import BLOCK, DTYPES, key

_END = bytes(2 * BLOCK)  # two empty blocks end a tar
_CODES = {"labels": "i", "blocks": "I", "sizes": "I", "crc32": "I", "positions": "q"}


class ShardWriter:
    """Writes images ``first``, ``first + 1``, ... of the data set to ``file``. The same images give the same bytes.

    ``columns`` grows by one value an image: those of the index, and ``positions``, the image's place among the sources.
    """

    def __init__(self, file: BinaryIO, first: int) -> None:
        self._file = file
        self._first = first
        self._sha256 = hashlib.sha256()
        self.bytes = 0
        self.columns = {name: array(code) for name, code in _CODES.items()}

    @property
    def samples(self) -> int:
        return len(self.columns["labels"])

    def length_with(self, image_bytes: int) -> int:
        """Bytes of the whole shard, were one image of ``image_bytes`` added."""
        return self.bytes + BLOCK + image_bytes + -image_bytes % BLOCK + 2 * BLOCK + len(_END)

    def add(self, data: bytes, extension: str, label: int, position: int) -> None:
        name = key(self._first + self.samples)
        values = (label, self.bytes // BLOCK + 1, len(data), zlib.crc32(data), position)
        self._member(f"{name}.{extension}", data)
        self._member(f"{name}.cls", str(label).encode())
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def _member(self, name: str, data: bytes) -> None:
        header = tarfile.TarInfo(name)  # no time, no owner: they would change the checksum
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        self._write(data)
        self._write(bytes(-len(data) % BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        """End the tar; its SHA-256."""
        self._write(_END)
        return self._sha256.hexdigest()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: np.array(column, DTYPES.get(name, np.int64)) for name, column in self.columns.items()}
