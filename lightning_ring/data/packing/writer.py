"""Images into shards, one after the other, each with a record, from which an interrupted packing
resumes; and at the end the records into an index, in a folder of its own, and the manifest.

Whatever ends it before the manifest has its name leaves the generation before as it was; the same
packing can then be finished by the same command.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.image import PackedImage
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.sources import (
    HEADER,
    Sources,
    report_row,
    sync_folder,
    whole_file,
    write_whole,
)
from lightning_ring.data.shards import (
    BLOCK,
    COLUMNS,
    MANIFEST,
    NAMES,
    REPORT,
    Manifest,
    Shard,
    ShardIndex,
    file_sha256,
    index_folder,
    key,
)

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


Progress = Callable[[int, int, int], None]  # sources done, sources in all, left out so far


@dataclass
class Rest:
    """Sources that led to no shard, because none of them can be packed."""

    counts: dict[str, int] = field(default_factory=dict)
    report: bytes = b""


class _NoImage(Exception):
    """A shard would have no image."""


def write_shards(
    images: Iterator[tuple[int, PackedImage | str]],
    sources: Sources,
    records: list[ShardRecord],
    job: PackJob,
    progress: Progress,
    rest: Rest,
) -> Iterator[ShardRecord]:
    """Write the shards that follow ``records``, yielding each once it is on the disk; fills
    ``rest``.
    """
    number, shard_bytes = len(records), job.settings.shard_bytes
    first = job.first_key + sum(record.shard.samples for record in records)
    left_out = sum(record.counts.get("left out", 0) for record in records)
    pending = next(images, None)
    while pending is not None:
        name, counts, rows = shard_name(job.first_shard + number), Counter[str](), list[bytes]()
        try:
            with whole_file(job.target / name, through=job.state / "shard.part") as file:
                shard = ShardWriter(file, first)
                while pending is not None:
                    position, image = pending
                    if isinstance(image, str):
                        counts["left out"] += 1
                        left_out += 1
                        rows.append(
                            report_row("left out", os.fsdecode(sources.name(position)), image)
                        )
                    elif shard.samples and shard.length_with(len(image.data)) > shard_bytes:
                        break
                    else:
                        counts[image.how] += 1
                        counts["not turned"] += image.lies
                        shard.add(image.data, image.extension, sources.label(position), position)
                        if image.note:
                            rows.append(
                                report_row(
                                    "converted", os.fsdecode(sources.name(position)), image.note
                                )
                            )
                    progress(position + 1, len(sources), left_out)
                    pending = next(images, None)
                sha256 = shard.finish()
                if not shard.samples:
                    raise _NoImage
        except _NoImage:
            rest.counts, rest.report = dict(counts), b"".join(rows)
            return
        done = Shard(name, shard.bytes, shard.samples, sha256)
        following = len(sources) if pending is None else pending[0]
        record = ShardRecord(done, following, dict(counts), b"".join(rows), shard.arrays())
        write_record(job.state, number, record)
        yield record
        number, first = number + 1, first + shard.samples


COUNTED = ("copied", "shrunk", "turned", "converted", "not turned", "left out")


def write_generation(
    job: PackJob,
    base: Manifest | None,
    sources: Sources,
    records: Sequence[ShardRecord],
    rest: Rest,
) -> Manifest:
    """Write the generation of ``base`` (None: there is none) and the new ``records``; the
    manifest last.
    """
    root, folder = job.target, index_folder(job.generation)
    shutil.rmtree(root / folder, ignore_errors=True)  # of a packing that never finished
    (root / folder).mkdir(parents=True)
    sync_folder((root / folder).parent)
    _write_index(root / folder, None if base is None else ShardIndex(root, base), sources, records)
    written = [f"{folder}/{name}" for name in [NAMES, *(f"{column}.npy" for column in COLUMNS)]]

    empty, report = _report(base, sources, records, rest)
    written.append(REPORT if base is None else f"{folder}/{REPORT}")
    with whole_file(root / written[-1]) as file:
        file.writelines(report)

    counts = Counter(rest.counts) + Counter({"left out": sources.left_out})
    for record in records:
        counts += Counter(record.counts)
    kept = (
        {}
        if base is None
        else {name: sha256 for name, sha256 in base.files.items() if name == REPORT}
    )
    manifest = Manifest(
        classes=sources.classes,
        shards=[*([] if base is None else base.shards), *(record.shard for record in records)],
        files=kept | {name: file_sha256(root / name) for name in sorted(written)},
        source=str(job.source),
        identity=sources.identity,
        settings=asdict(job.settings),
        counts={name: counts[name] for name in COUNTED} | {"empty classes": empty},
        generation=job.generation,
    )
    if base is not None:
        added = sum(record.shard.samples for record in records)
        manifest.counts.update({"added": added, "there": sources.there})
    text = manifest.to_json().encode()
    write_whole(root / folder / MANIFEST, text)  # of this generation, when there is a later one
    write_whole(root / MANIFEST, text)
    return manifest


def _write_index(
    folder: Path, base: ShardIndex | None, sources: Sources, records: Sequence[ShardRecord]
) -> None:
    """The rows of ``base`` and those of ``records`` behind them, as
    `lightning_ring.data.shards` has them.
    """
    if base is not None:
        base.check_all()  # the checksums of the copy would take damage for whole
    positions = np.concatenate([record.columns["positions"] for record in records])
    names = [sources.name(position) for position in positions.tolist()]
    new: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate([record.columns[name] for record in records])
        for name in ("labels", "places")
    }
    new["stamps"] = sources.stamps[sources.order[positions]]
    new["name_ends"] = np.cumsum([len(name) + 1 for name in names]) - 1
    # One name a line. A name may hold a line feed, so readers go by the ends.
    with whole_file(folder / NAMES) as file:
        if base is not None:
            new["name_ends"] += file.write(base.names[0].data)
        file.writelines(name + b"\n" for name in names)
    for column, (dtype, _) in COLUMNS.items():
        rows = [new[column]] if base is None else [base.column(column), new[column]]
        with whole_file(folder / f"{column}.npy") as file:
            np.save(file, np.concatenate(rows).astype(dtype))


def _report(
    base: Manifest | None, sources: Sources, records: Sequence[ShardRecord], rest: Rest
) -> tuple[int, list[bytes]]:
    """The number of classes without an image, and all rows of the report. Classes of ``base``
    are not new.
    """
    present = np.zeros(len(sources.classes), bool)
    present[: 0 if base is None else len(base.classes)] = True
    for record in records:
        present[record.columns["labels"]] = True
    empty = np.flatnonzero(~present)
    classes = [
        report_row(
            "empty class", sources.classes[number], f"has no image; label {number} does not occur"
        )
        for number in empty
    ]
    return len(empty), [
        HEADER,
        sources.report,
        *(record.report for record in records),
        rest.report,
        *classes,
    ]
