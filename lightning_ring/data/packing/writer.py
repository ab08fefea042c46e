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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_ring.data.packing.image import PackedImage, PackSettings
from lightning_ring.data.packing.sources import HEADER, Sources, report_row
from lightning_ring.data.shards import (
    BLOCK,
    COLUMNS,
    INDEX_FILES,
    MANIFEST,
    NAMES,
    NO_SET,
    REPORT,
    Manifest,
    Shard,
    ShardIndex,
    file_sha256,
    index_folder,
)
from lightning_ring.host.whole_file import sync_folder, whole_file, write_whole

_END = bytes(2 * BLOCK)  # two empty blocks end a tar
_TREATMENTS = ("copied", "shrunk", "turned", "converted", "not turned", "left out")

Columns = dict[str, Any]  # arrays
Progress = Callable[[int, int, int], None]  # sources done, sources in all, left out so far


@dataclass(frozen=True)
class PackJob:
    """
    Args:
        classes: Names of classes in the order of their numbers; None: by name, after those of
            ``base``.
        base: The set in ``target`` to which images are appended; `NO_SET` for a new one.
    """

    source: Path
    target: Path
    settings: PackSettings
    classes: Sequence[str] | None = None
    base: Manifest = NO_SET

    @property
    def state(self) -> Path:
        """The folder, in that of the set, of what is unfinished."""
        return self.target / ".packing"

    @property
    def identity(self) -> dict[str, object]:
        """The same for two commands that may go on with each other's shards."""
        return {"source": str(self.source), **asdict(self.settings)}

    @property
    def generation(self) -> int:
        """The one that will be made."""
        return self.base.generation + 1


class ShardWriter:
    """Writes images with the numbers ``first``, ``first + 1``, ... to ``file``. The same images
    give the same bytes.
    """

    def __init__(self, file: BinaryIO, first: int) -> None:
        self._file = file
        self._first = first
        self._sha256 = hashlib.sha256()
        self.bytes = 0
        # of each image: its label and its place among the sources, and in the index
        self.rows: list[tuple[int, int, int, int, int]] = []

    @property
    def samples(self) -> int:
        return len(self.rows)

    def has_room(self, image: PackedImage, most: float) -> bool:
        """Whether the whole shard has at most ``most`` bytes with ``image``, which may be the first
        whatever its length.
        """
        image_bytes = len(image.data) + -len(image.data) % BLOCK
        return not self.samples or self.bytes + image_bytes + 3 * BLOCK + len(_END) <= most

    def add(self, image: PackedImage, label: int, position: int) -> None:
        name = f"{self._first + self.samples:09d}"
        block, crc32 = self.bytes // BLOCK + 1, zlib.crc32(image.data)
        self.rows.append((label, position, block, len(image.data), crc32))
        self._member(f"{name}.{image.extension}", image.data)
        self._member(f"{name}.cls", str(label).encode())

    def _member(self, name: str, data: bytes) -> None:
        header = tarfile.TarInfo(name)  # no time, no owner: they would change the checksum
        header.size = len(data)
        self._write(header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.bytes += len(data)

    def finish(self, name: str) -> tuple[Shard, Columns]:
        """End the tar, which will be called ``name``."""
        self._write(_END)
        table = np.array(self.rows, np.int64)
        places = table[:, 2:].astype(np.uint32)
        columns = {"labels": table[:, 0], "positions": table[:, 1], "places": places}
        return Shard(name, self.bytes, self.samples, self._sha256.hexdigest()), columns


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A finished shard. ``next_position``: the first source after it; ``report``: rows on the
    sources before that.
    """

    shard: Shard
    next_position: int
    counts: dict[str, int]
    report: bytes
    columns: Columns

    def write(self, folder: Path) -> None:
        head = json.dumps([asdict(self.shard), self.next_position, self.counts]).encode()
        texts = [np.frombuffer(text, np.uint8) for text in (head, self.report)]
        with whole_file(folder / f"{self.shard.name}.npz") as file:
            np.savez(file, head=texts[0], report=texts[1], **self.columns)


def read_record(path: Path) -> ShardRecord:
    with np.load(path) as file:
        columns = dict(file)
    shard, next_position, counts = json.loads(columns.pop("head").tobytes())
    report = columns.pop("report").tobytes()
    return ShardRecord(Shard(**shard), next_position, counts, report, columns)


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def read_records(job: PackJob) -> list[ShardRecord]:
    """Records of the finished shards of ``job``, from the first on; one whose tar is not as long as
    it was ends the list.

    Those after it are removed: they follow a shard that may be written anew with other images.
    """
    records: list[ShardRecord] = []
    paths = sorted(job.state.glob("shard-*.npz"))
    for path in paths:
        record = read_record(path)
        tar = job.target / shard_name(len(job.base.shards) + len(records))
        is_next = record.shard.name == tar.name and tar.exists()
        if not is_next or tar.stat().st_size != record.shard.bytes:
            break
        records.append(record)
    # the last first: interrupted, this leaves no gap
    for stale in reversed(paths[len(records) :]):
        stale.unlink()
    return records


def write_shards(
    images: Iterator[tuple[int, PackedImage | str]],
    sources: Sources,
    records: Sequence[ShardRecord],
    job: PackJob,
    progress: Progress,
) -> Iterator[ShardRecord]:
    """Write the shards that follow ``records``, yielding each once it is on the disk.

    A last one without images is no file: it says why no other source could be packed.
    """
    number = len(job.base.shards) + len(records)
    first = job.base.samples + sum(record.shard.samples for record in records)
    left_out = sum(record.counts.get("left out", 0) for record in records)
    # what was done with the sources since the last shard
    counts, rows = Counter[str](), list[bytes]()

    def usable() -> Iterator[tuple[int, PackedImage]]:
        nonlocal left_out
        for position, image in images:
            if isinstance(image, str):
                left_out += 1
                counts["left out"] += 1
                rows.append(report_row("left out", sources.packed_name(position), image))
            progress(position + 1, len(sources), left_out)
            if not isinstance(image, str):
                yield position, image

    following = usable()
    pending = next(following, None)
    while pending is not None:
        name = shard_name(number)
        with whole_file(job.target / name, through=job.state / "shard.part") as file:
            writer = ShardWriter(file, first)
            while pending and writer.has_room(pending[1], job.settings.shard_mb * 2**20):
                position, image = pending
                counts.update({image.how: 1, "not turned": image.lies})
                if image.note:
                    rows.append(report_row("converted", sources.packed_name(position), image.note))
                writer.add(image, sources.label(position), position)
                pending = next(following, None)
            shard, columns = writer.finish(name)
        next_position = len(sources) if pending is None else pending[0]
        record = ShardRecord(shard, next_position, dict(counts), b"".join(rows), columns)
        record.write(job.state)
        counts.clear()
        rows.clear()
        yield record
        number, first = number + 1, first + shard.samples
    if rows:
        yield ShardRecord(Shard("", 0, 0, ""), len(sources), dict(counts), b"".join(rows), {})


def count_treatments(sources: Sources, records: Sequence[ShardRecord]) -> dict[str, int]:
    counts = sum((Counter(record.counts) for record in records), Counter[str]())
    counts["left out"] += sources.left_out
    return {name: counts[name] for name in _TREATMENTS}


def report_of(sources: Sources, records: Sequence[ShardRecord]) -> list[bytes]:
    return [HEADER, sources.report, *(record.report for record in records)]


def write_generation(job: PackJob, sources: Sources, records: Sequence[ShardRecord]) -> Manifest:
    """Write the generation after `PackJob.base`, which has the new ``records`` too; the manifest
    last.
    """
    root, base, folder = job.target, job.base, index_folder(job.generation)
    counts, report = count_treatments(sources, records), report_of(sources, records)
    records = [record for record in records if record.shard.samples]
    shutil.rmtree(root / folder, ignore_errors=True)  # of a packing that never finished
    (root / folder).mkdir(parents=True)
    sync_folder((root / folder).parent)
    _write_index(root, folder, base, sources, records)

    # classes of `base` are not new
    present = {*range(len(base.classes))}
    for record in records:
        present.update(record.columns["labels"].tolist())
    empty = [number for number in range(len(sources.classes)) if number not in present]
    for number in empty:
        detail = f"has no image; label {number} does not occur"
        report.append(report_row("empty class", sources.classes[number], detail))
    report_name = f"{folder}/{REPORT}" if job.generation else REPORT
    with whole_file(root / report_name) as file:
        file.writelines(report)

    written = [report_name, *(f"{folder}/{name}" for name in INDEX_FILES)]
    counts["empty classes"] = len(empty)
    shards = [record.shard for record in records]
    files = {name: file_sha256(root / name) for name in sorted(written)}
    if job.generation:
        counts |= {"added": sum(shard.samples for shard in shards), "there": sources.there}
        shards, files = [*base.shards, *shards], {REPORT: base.files[REPORT]} | files
    about = (str(job.source), sources.identity, asdict(job.settings), counts, job.generation)
    manifest = Manifest(sources.classes, shards, files, *about)
    text = manifest.to_json().encode()
    write_whole(root / folder / MANIFEST, text)  # of this generation, when there is a later one
    write_whole(root / MANIFEST, text)
    return manifest


def _write_index(
    root: Path,
    folder: str,
    base: Manifest,
    sources: Sources,
    records: Sequence[ShardRecord],
) -> None:
    """The rows of ``base`` and after them those of ``records``."""
    new: Columns = {
        name: np.concatenate([record.columns[name] for record in records])
        for name in ("labels", "places", "positions")
    }
    positions = new["positions"]
    names = [os.fsencode(sources.packed_name(position)) for position in positions.tolist()]
    new["stamps"] = sources.stamps[sources.order[positions]]
    new["name_ends"] = np.cumsum([len(name) + 1 for name in names]) - 1
    index = ShardIndex(root, base) if base.samples else None
    # One name a line. A name may hold a line feed, so readers go by the ends.
    with whole_file(root / folder / NAMES) as file:
        if index is not None:
            for name in INDEX_FILES:
                index.check(name)  # the checksums of the copy would take damage for whole
            new["name_ends"] += file.write(index.names[0].data)
        file.writelines(line + b"\n" for line in names)
    for column, (dtype, _) in COLUMNS.items():
        rows = [new[column]] if index is None else [index.column(column), new[column]]
        with whole_file(root / folder / f"{column}.npy") as file:
            np.save(file, np.concatenate(rows).astype(dtype))
