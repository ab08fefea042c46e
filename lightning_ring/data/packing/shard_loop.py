"""Images into shards, one after the other, each with its record."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_ring.data.packing.files import report_row, whole_file
from lightning_ring.data.packing.image import PackedImage
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.shard_writer import (
    ShardRecord,
    ShardWriter,
    shard_name,
    write_record,
)
from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards.manifest import Shard

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
