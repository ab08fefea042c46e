"""What a set holds, from its index alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_ring.data.sets.lock import is_unfinished
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import generations, read_manifest


@dataclass(frozen=True)
class Statistics:
    """
    Args:
        classes: Images of each class, by name.
        bytes: Of the images of this generation; ``disk_bytes`` of the shards of all generations.
        deleted: Images that are in this generation's shards and not in it.
        columns: What each column of the metadata holds.
        generations: Number, images and change of each that can be opened, the oldest first.
        unfinished: An append has begun, and not finished.
    """

    root: str
    generation: int
    images: int
    shards: int
    classes: dict[str, int]
    bytes: int
    disk_bytes: int
    deleted: int
    columns: dict[str, str]
    generations: list[tuple[int, int, str]]
    unfinished: bool


def statistics(root: Path, generation: int | None = None) -> Statistics:
    """Raises `ShardError`: ``root`` is no set, or lacks this generation."""
    manifest = read_manifest(root, generation)
    index = ShardIndex(root, manifest)
    counts = np.bincount(index.labels, minlength=len(manifest.classes)).tolist()
    history = [read_manifest(root, number) for number in generations(root)]
    disk = {shard.name: shard.bytes for each in history for shard in each.shards}
    return Statistics(
        root=str(root),
        generation=manifest.generation,
        images=manifest.samples,
        shards=len(manifest.shards),
        classes=dict(zip(manifest.classes, counts, strict=True)),
        bytes=int(index.column("places")[:, 1].sum(dtype=np.int64)),
        disk_bytes=sum(disk.values()),
        deleted=sum(shard.deleted for shard in manifest.shards),
        columns={name: _describe(column) for name, column in index.metadata.items()},
        generations=[(each.generation, each.samples, each.change) for each in history],
        unfinished=is_unfinished(root, read_manifest(root)),
    )


def _describe(column: Column) -> str:
    if column.ends is not None:
        empty = int((column.lengths == 0).sum())
        return f"{column.kind}, {len(column.values)} in all, none for {empty} images"
    if column.kind == "text":
        empty = int((np.array([not text for text in column.texts] or [True])[column.values]).sum())
        return f"text, {len(set(column.texts) - {''})} different, missing for {empty} images"
    numbers = column.values[~np.isnan(column.values)]
    span = f"{numbers.min():g} to {numbers.max():g}" if len(numbers) else "none"
    return f"number, {span}, missing for {len(column) - len(numbers)} images"
