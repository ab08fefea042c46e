"""``lightning-ring prune``: old generations removed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_ring.cli.sets.running import UNCHANGED, count, exit_code, folder


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged. Raises `ConfigurationError`: another process changes the set."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring prune",
        description="Remove old generations of a packed set, and shards that no other generation has. Jobs that read "
        "them fail, and checkpoints that name them cannot go on exactly.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("--keep", type=int, default=1, metavar="N", help="newest generations to keep (default: 1)")
    parser.add_argument("--unfinished", action="store_true", help="give up a `pack --append` that has not finished")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.prune import prune_set

        found = prune_set(options.set, options.keep, options.unfinished)
        shards = f"{count(len(found.shards), 'shard')} ({found.bytes / 2**20:.1f} MiB)"
        print(f"{options.set}: {count(len(found.generations), 'generation')} and {shards} removed")
        return 0

    return exit_code("prune", run, UNCHANGED)
