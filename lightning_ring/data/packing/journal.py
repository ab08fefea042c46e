"""What is known of shards that are finished while others are not: from there an interrupted packing goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.whole_file import whole_file
from lightning_ring.data.shards.manifest import Shard


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard. ``next_position``: the first source after it; ``report``: rows on the sources before that."""

    shard: Shard
    next_position: int
    counts: dict[str, int]
    report: bytes
    columns: dict[str, npt.NDArray[Any]]


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def write_record(folder: Path, number: int, record: ShardRecord) -> None:
    head = {"shard": asdict(record.shard), "next_position": record.next_position, "counts": record.counts}
    arrays: dict[str, Any] = {
        "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
        "report": np.frombuffer(record.report, np.uint8),
        **record.columns,
    }
    with whole_file(_path(folder, number)) as file:
        np.savez(file, **arrays)


def read_records(folder: Path, shards: Path) -> list[ShardRecord]:
    """Records of finished shards, from the first on; one whose tar is not as long as it was ends the list.

    Those after it are removed: they follow a shard that may be written anew with other images.
    """
    records: list[ShardRecord] = []
    while _path(folder, len(records)).exists():
        record = _read(_path(folder, len(records)))
        tar = shards / record.shard.name
        if not tar.exists() or tar.stat().st_size != record.shard.bytes:
            break
        records.append(record)
    number = len(records)
    while _path(folder, number).exists():
        number += 1
    for stale in reversed(range(len(records), number)):  # the last first: interrupted, this leaves no gap
        _path(folder, stale).unlink()
    return records


def _read(path: Path) -> ShardRecord:
    with np.load(path) as file:
        head, report = json.loads(file["head"].tobytes()), file["report"].tobytes()
        columns = {name: file[name] for name in file.files if name not in ("head", "report")}
    return ShardRecord(Shard(**head["shard"]), head["next_position"], head["counts"], report, columns)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{shard_name(number)}.npz"
