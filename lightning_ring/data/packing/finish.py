"""The end of a packing: records of the shards become an index, in a folder of its own, and the
manifest.

Whatever ends it before the manifest has its name leaves the generation before as it was; the same
packing can then be finished by the same command.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import (
    HEADER,
    report_row,
    sync_folder,
    whole_file,
    write_whole,
)
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.shard_loop import Rest
from lightning_ring.data.packing.shard_writer import ShardRecord
from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards.index import COLUMNS, NAMES, ShardIndex
from lightning_ring.data.shards.manifest import (
    MANIFEST,
    REPORT,
    Manifest,
    file_sha256,
    index_folder,
)

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
    `lightning_ring.data.shards.index` has them.
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
