"""Shards that hold deleted images are written anew, without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import whole_file
from lightning_ring.data.packing.shard_writer import ShardWriter, shard_name
from lightning_ring.data.sets.generation import following, images, new_shards, write_generation
from lightning_ring.data.sets.lock import PACKING, changing
from lightning_ring.data.sets.rows import SetRows
from lightning_ring.data.shards.files import ShardFiles
from lightning_ring.data.shards.index import BLOCK, ShardIndex
from lightning_ring.data.shards.manifest import Manifest, Shard


def compact_set(root: Path) -> Manifest:
    """Make a generation whose shards hold no deleted image. Images keep their order, labels, names and metadata.

    Shards with deleted images are written anew, neighbours into one where they fit. The old ones stay for older
    generations, until `prune_set` removes these. In new shards the ``.cls`` files are those of this generation.

    Raises:
        ConfigurationError: Another process changes the set, or images were being appended and that has not finished.
        ShardError: ``root`` is no set, or is damaged.
    """
    root = Path(root)
    with changing(root) as manifest, new_shards(root, manifest) as made:
        num = sum(shard.deleted for shard in manifest.shards)
        if not num:
            return manifest
        index = ShardIndex(root, manifest)
        places = np.array(index.column("places"))
        rows = SetRows(root, manifest, places=places)
        plan = following(manifest, f"compact {images(num)}")
        shards: list[Shard] = []
        for has_deleted, group in groupby(manifest.shards, key=lambda shard: shard.deleted > 0):
            old = list(group)
            if not has_deleted:
                shards += old
                continue
            first = sum(shard.samples for shard in shards)
            stop = first + sum(shard.samples for shard in old)
            while first < stop:
                shard = _write_shard(root, plan, index, places, first, stop)
                made.append(shard.name)
                shards.append(shard)
                first += shard.samples
                plan = replace(plan, next_shard=plan.free_shard + 1, next_key=plan.free_key + shard.samples)
        rows.shards = shards
        return write_generation(root, plan, [rows], manifest, deleted=index.deleted)


def _write_shard(
    root: Path, plan: Manifest, index: ShardIndex, places: npt.NDArray[Any], first: int, stop: int
) -> Shard:
    """Write images ``first`` and further ones, before ``stop``, into one shard; ``places`` then says where they are."""
    files, shard_bytes = ShardFiles(root, plan.shards), int(plan.settings["shard_mb"] * 2**20)
    name = shard_name(plan.free_shard)
    with whole_file(root / name, through=root / PACKING / "shard.part") as file:
        shard = ShardWriter(file, plan.free_key)
        for i in range(first, stop):
            place = index.place(i)
            if shard.samples and shard.length_with(place.size) > shard_bytes:
                break
            header = files.read(place._replace(offset=place.offset - BLOCK, size=BLOCK))
            extension = header[:100].rstrip(b"\0").decode().partition(".")[2]
            shard.add(files.read_whole(place), extension, int(index.labels[i]), i)
        sha256 = shard.finish()
    places[first : first + shard.samples] = shard.arrays()["places"]
    return Shard(name, shard.bytes, shard.samples, sha256)
