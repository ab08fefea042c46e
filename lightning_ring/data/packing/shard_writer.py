"""A shard as it is written, and the record of a finished shard, from which an interrupted
packing resumes.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zlib
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import whole_file
from lightning_ring.data.shards.index import BLOCK, COLUMNS, key
from lightning_ring.data.shards.manifest import Shard

_END = bytes(2 * BLOCK)  # two empty blocks end a tar
_CODES = {"labels": "i", "places": "I", "positions": "q"}


class ShardWriter:
    """Writes images with the numbers ``first``, ``first + 1``, ... to ``file``. The same images
    give the same bytes.

    ``columns`` grows by one row an image: those of the index, and ``positions``, the image's place
    among the sources.
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
        place = self.bytes // BLOCK + 1, len(data), zlib.crc32(data)
        self._member(f"{name}.{extension}", data)
        self._member(f"{name}.cls", str(label).encode())
        self.columns["labels"].append(label)
        self.columns["places"].extend(place)
        self.columns["positions"].append(position)

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
        labels, places, positions = self.columns.values()
        return {
            "labels": np.array(labels, COLUMNS["labels"][0]),
            "places": np.array(places, COLUMNS["places"][0]).reshape(-1, 3),
            "positions": np.array(positions, np.int64),
        }


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard. ``next_position``: the first source after it; ``report``: rows on the
    sources before that.
    """

    shard: Shard
    next_position: int
    counts: dict[str, int]
    report: bytes
    columns: dict[str, npt.NDArray[Any]]


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def write_record(folder: Path, number: int, record: ShardRecord) -> None:
    head = {
        "shard": asdict(record.shard),
        "next_position": record.next_position,
        "counts": record.counts,
    }
    arrays: dict[str, Any] = {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "report": np.frombuffer(record.report, np.uint8),
        **record.columns,
    }
    with whole_file(_record_path(folder, number)) as file:
        np.savez(file, **arrays)


def read_records(folder: Path, shards: Path, first: int = 0) -> list[ShardRecord]:
    """Records of finished shards, from the first on; one whose tar is not as long as it was ends
    the list.

    Those after it are removed: they follow a shard that may be written anew with other images.

    Args:
        first: Number of the first shard.
    """
    records: list[ShardRecord] = []
    while _record_path(folder, len(records)).exists():
        with np.load(_record_path(folder, len(records))) as file:
            head, report = json.loads(file["head"].tobytes()), file["report"].tobytes()
            columns = {name: file[name] for name in file.files if name not in ("head", "report")}
        record = ShardRecord(
            Shard(**head["shard"]), head["next_position"], head["counts"], report, columns
        )
        tar = shards / record.shard.name
        if record.shard.name != shard_name(first + len(records)):
            break  # of another packing
        if not tar.exists() or tar.stat().st_size != record.shard.bytes:
            break
        records.append(record)
    number = len(records)
    while _record_path(folder, number).exists():
        number += 1
    # the last first: interrupted, this leaves no gap
    for stale in reversed(range(len(records), number)):
        _record_path(folder, stale).unlink()
    return records


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"{shard_name(number)}.npz"
