"""The end of a packing: records of the shards become the index, and the manifest says that all is there."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import HEADER, report_row, whole_file, write_whole
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_writer import ShardRecord
from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards.index import COLUMNS, NAMES
from lightning_ring.data.shards.manifest import MANIFEST, REPORT, Manifest, file_sha256

COUNTED = ("copied", "shrunk", "turned", "converted", "not turned", "left out")


def write_manifest(
    target: Path, source: Path, settings: PackSettings, sources: Sources, records: Sequence[ShardRecord]
) -> Manifest:
    """Write the index, the report and, last, the manifest; then remove the files of the unfinished packing."""
    manifest = Manifest(
        classes=sources.classes,
        shards=[record.shard for record in records],
        files={},
        source=str(source),
        identity=sources.identity,
        settings=asdict(settings),
        counts={},
    )
    index = target / manifest.index
    index.mkdir(parents=True, exist_ok=True)
    columns = {name: np.concatenate([record.columns[name] for record in records]) for name in ("labels", "places")}
    positions = np.concatenate([record.columns["positions"] for record in records])
    columns["stamps"] = sources.stamps[sources.order[positions]]
    columns["name_ends"] = _write_names(index / NAMES, sources, records)
    for name, values in columns.items():
        with whole_file(index / f"{name}.npy") as file:
            np.save(file, values.astype(COLUMNS[name][0], copy=False))
    empty = _write_report(target, sources, records)
    files = [*(f"{manifest.index}/{name}.npy" for name in columns), f"{manifest.index}/{NAMES}", REPORT]
    manifest.files.update((name, file_sha256(target / name)) for name in sorted(files))
    counts = sum((Counter(record.counts) for record in records), Counter({"left out": sources.left_out}))
    manifest.counts.update({name: counts[name] for name in COUNTED}, **{"empty classes": empty})
    text = manifest.to_json().encode()
    write_whole(index / MANIFEST, text)  # of this generation, when there is a later one
    write_whole(target / MANIFEST, text)
    shutil.rmtree(target / ".packing")
    return manifest


def _write_names(path: Path, sources: Sources, records: Sequence[ShardRecord]) -> npt.NDArray[np.int64]:
    """One name a line. A name may hold a line feed, so readers go by the ends, which are returned."""
    ends = np.empty(sum(record.shard.samples for record in records), np.int64)
    at, i = 0, 0
    with whole_file(path) as file:
        for record in records:
            for position in record.columns["positions"]:
                at += file.write(sources.name(position) + b"\n")
                ends[i] = at - 1
                i += 1
    return ends


def _write_report(target: Path, sources: Sources, records: Sequence[ShardRecord]) -> int:
    """The number of classes without an image; each is in the report."""
    present = np.zeros(len(sources.classes), bool)
    with whole_file(target / REPORT) as file:
        for text in (HEADER, sources.report, *(record.report for record in records)):
            file.write(text)
        for record in records:
            present[record.columns["labels"]] = True
        for number in np.flatnonzero(~present):
            detail = f"has no image; label {number} does not occur"
            file.write(report_row("empty class", sources.classes[number], detail))
    return int((~present).sum())
