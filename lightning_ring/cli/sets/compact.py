"""``lightning-ring compact``: the bytes of deleted images left out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_ring.cli.sets.running import UNCHANGED, count, exit_code, folder


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged, or the disk full. Raises `ConfigurationError`: another process changes the set."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring compact",
        description="Make a generation of a packed set in which shards with deleted images are written anew, without "
        "them. The old shards stay for older generations; `lightning-ring prune` removes both.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.compact import compact_set
        from lightning_ring.data.shards.manifest import read_manifest

        before = read_manifest(options.set)
        manifest = compact_set(options.set)
        new = [shard for shard in manifest.shards if shard not in before.shards]
        size = f"{count(len(new), 'shard')} ({sum(shard.bytes for shard in new) / 2**20:.1f} MiB)"
        done = f"{size} written anew" if new else "nothing to do: its shards hold no deleted image"
        print(f"{options.set}: {done}; generation {manifest.generation} has {count(manifest.samples, 'image')}")
        return 0

    return exit_code("compact", run, UNCHANGED)
