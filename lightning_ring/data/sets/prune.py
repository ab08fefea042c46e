"""Old generations, and what was never finished, are removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from lightning_ring.data.sets.lock import PACKING, changing, clear, is_unfinished, only_one
from lightning_ring.data.shards.manifest import MANIFEST, generations, index_folder, read_manifest
from lightning_ring.errors import ConfigurationError


class Pruned(NamedTuple):
    generations: list[int]
    shards: list[str]
    bytes: int  # of those shards


def prune_set(root: Path, keep: int = 1, unfinished: bool = False) -> Pruned:
    """Remove all generations but the newest ``keep``, and shards that no other generation has.

    Data sets that are open at a removed generation fail at a shard that is gone; so do checkpoints that name it.

    Args:
        unfinished: Give up an append that has not finished; its shards are removed too.

    Raises:
        ConfigurationError: An append has not finished, or another process changes the set.
        ShardError: ``root`` is no set.
    """
    if keep < 1:
        raise ConfigurationError(f"--keep {keep}: expected 1 or more, the newest one stays.")
    root = Path(root)
    newest = read_manifest(root)
    if unfinished and is_unfinished(root, newest):
        with only_one(root / PACKING, root):
            for part in (root / PACKING).glob("part-*"):
                with only_one(part, root):
                    pass  # nobody is packing it
            clear(root / PACKING)
    with changing(root):
        old = generations(root)[:-keep]
        for generation in old:
            (root / index_folder(generation) / MANIFEST).unlink(missing_ok=True)  # first: it cannot be opened any more
        there = set(generations(root))
        for folder in (root / "index").iterdir():
            if folder.name.isdecimal() and int(folder.name) not in there:
                shutil.rmtree(folder)
        named = {shard.name for generation in generations(root) for shard in read_manifest(root, generation).shards}
        gone = [path for path in sorted(root.glob("shard-*.tar")) if path.name not in named]
        size = sum(path.stat().st_size for path in gone)
        for path in gone:
            path.unlink()
    return Pruned(old, [path.name for path in gone], size)
