"""The end of a packing: records of the shards become the index, and the manifest says that all is there."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import HEADER, report_row, whole_file, write_whole
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_writer import ShardRecord
from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards.index import DTYPES, FOLDER, NAMES
from lightning_ring.data.shards.manifest import MANIFEST, REPORT, Manifest, file_sha256


def write_manifest(
    target: Path, source: Path, settings: PackSettings, sources: Sources, records: Sequence[ShardRecord]
) -> Manifest:
    """Write the index, the report and, last, the manifest; then remove the files of the unfinished packing."""
    (target / FOLDER).mkdir(exist_ok=True)
    files = [f"{FOLDER}/{NAMES}"]
    for name in ("labels", "blocks", "sizes", "crc32"):
        _save_column(target, name, np.concatenate([record.columns[name] for record in records]))
        files.append(f"{FOLDER}/{name}.npy")
    _write_names(target, sources, records)
    files.append(f"{FOLDER}/name_ends.npy")
    empty = _write_report(target, sources, records)
    files.append(REPORT)
    counts = sum((Counter(record.counts) for record in records), Counter({"left out": sources.left_out}))
    counted = ("copied", "shrunk", "turned", "converted", "left out")
    manifest = Manifest(
        classes=sources.classes,
        shards=[record.shard for record in records],
        files={name: file_sha256(target / name) for name in sorted(files)},
        source=str(source),
        settings=asdict(settings),
        counts={**{name: counts[name] for name in counted}, "empty classes": empty},
    )
    write_whole(target / MANIFEST, manifest.to_json().encode())
    shutil.rmtree(target / ".packing")
    return manifest


def _save_column(target: Path, name: str, values: npt.NDArray[Any]) -> None:
    with whole_file(target / FOLDER / f"{name}.npy") as file:
        np.save(file, values.astype(DTYPES[name], copy=False))


def _write_names(target: Path, sources: Sources, records: Sequence[ShardRecord]) -> None:
    """One name a line. A name may hold a line feed, so readers go by ``name_ends``."""
    ends = np.empty(sum(record.shard.samples for record in records), DTYPES["name_ends"])
    at, i = 0, 0
    with whole_file(target / FOLDER / NAMES) as file:
        for record in records:
            for position in record.columns["positions"]:
                at += file.write(sources.name(position) + b"\n")
                ends[i] = at - 1
                i += 1
    _save_column(target, "name_ends", ends)


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
