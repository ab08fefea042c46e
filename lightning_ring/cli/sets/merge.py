"""``lightning-ring merge``: several sets into one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_ring.cli.sets.running import UNCHANGED, count, exit_code, folder


def main(arguments: Sequence[str]) -> int:
    """0; 1 where a set is damaged. Raises `ConfigurationError`: the sets do not fit together."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring merge",
        description="Add the newest generations of packed sets to another one, which may be new. Classes go by name. "
        "Shards are linked where the file system has hard links, else copied.",
    )
    parser.add_argument("sets", nargs="+", type=folder, metavar="SET", help="folders of packed images")
    parser.add_argument("--into", type=folder, required=True, metavar="SET", help="the set that gets their images")
    parser.add_argument("--prefixes", action="store_true", help="put the name of its folder before each set's names")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.merge import merge_sets

        manifest = merge_sets(options.sets, options.into, options.prefixes)
        images, classes = count(manifest.samples, "image"), count(len(manifest.classes), "class")
        print(f"{options.into}: generation {manifest.generation} has {images} of {classes}")
        return 0

    return exit_code("merge", run, UNCHANGED)
