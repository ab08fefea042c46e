"""The end of a packing: records of the shards become the rows of a generation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import HEADER, report_row
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.shard_loop import Rest
from lightning_ring.data.packing.shard_writer import ShardRecord
from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.sets.generation import images, write_generation
from lightning_ring.data.sets.rows import Rows, SetRows
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.manifest import Manifest, Shard

COUNTED = ("copied", "shrunk", "turned", "converted", "not turned", "left out")


class PackedRows:
    """Images that were packed just now (a `Rows`)."""

    metadata: Mapping[str, Column] = {}

    def __init__(self, sources: Sources, records: Sequence[ShardRecord]) -> None:
        self._sources = sources
        self._records = records
        self.shards: Sequence[Shard] = [record.shard for record in records]

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def column(self, name: str) -> Iterator[npt.NDArray[Any]]:
        for record in self._records:
            if name == "stamps":
                yield self._sources.stamps[self._sources.order[record.columns["positions"]]]
            else:
                yield record.columns[name]

    def names(self) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
        for record in self._records:
            names = [self._sources.name(position) for position in record.columns["positions"]]
            yield b"".join(name + b"\n" for name in names), np.fromiter(map(len, names), np.int64, len(names))


def write_manifest(
    job: PackJob, base: Manifest | None, sources: Sources, parts: Sequence[Sequence[ShardRecord]], rest: Rest
) -> Manifest:
    """Write the generation of ``base`` (None: there is none) and the records of every part of a packing."""
    records = [record for part in parts for record in part]
    rows: list[Rows] = [PackedRows(sources, records)]
    deleted: set[str] = set()
    if base is not None:
        there = SetRows(job.target, base)
        rows.insert(0, there)
        deleted = set(there.index.deleted)
        if deleted and job.restore:
            deleted -= {
                os.fsdecode(sources.name(i)) for record in records for i in record.columns["positions"].tolist()
            }
    empty, report = _report(base, sources, records, rest)
    counts = sum((Counter(record.counts) for record in records), Counter(rest.counts) + Counter(_listed(sources)))
    added, old = sum(record.shard.samples for record in records), 0 if base is None else len(base.classes)
    plan = Manifest(
        classes=sources.classes,
        shards=[],
        files={},
        source=str(job.source),
        identity=sources.identity,
        settings=asdict(job.settings) | ({"prefix": job.prefix} if job.prefix else {}),
        counts={name: counts[name] for name in COUNTED} | {"empty classes": empty},
        generation=job.generation,
        change="pack" if base is None else f"append {images(added)} of {job.source}",
        next_shard=job.first_shard + max(map(len, parts)),
        next_key=job.first_key + (added if job.parts == 1 else len(sources)),
    )
    if base is not None:
        plan.counts.update({"added": added, "there": sources.there, "new classes": len(sources.classes) - old})
    return write_generation(job.target, plan, rows, base, report, deleted)


def _listed(sources: Sources) -> dict[str, int]:
    return {"left out": sources.left_out}


def _report(
    base: Manifest | None, sources: Sources, records: Sequence[ShardRecord], rest: Rest
) -> tuple[int, list[bytes]]:
    """The number of classes without an image, and all rows of the report. Classes of ``base`` are not new."""
    present = np.zeros(len(sources.classes), bool)
    present[: 0 if base is None else len(base.classes)] = True
    for record in records:
        present[record.columns["labels"]] = True
    empty = np.flatnonzero(~present)
    classes = [
        report_row("empty class", sources.classes[number], f"has no image; label {number} does not occur")
        for number in empty
    ]
    return len(empty), [HEADER, sources.report, *(record.report for record in records), rest.report, *classes]
