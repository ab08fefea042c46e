"""``lightning-ring relabel``: images of a set into other classes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.sets.running import UNCHANGED, exit_code, folder


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged. Raises `ConfigurationError`: there is no such image or class."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring relabel",
        usage="%(prog)s SET LABELS.csv [--new-classes]\n       %(prog)s SET --where EXPR --to CLASS [--new-classes]",
        description="Make a generation of a packed set in which images are of other classes. Shards stay as they are, "
        "so the .cls files in them are those of the packing.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("labels", nargs="?", type=Path, metavar="LABELS.csv", help="with the columns path and label")
    parser.add_argument("--where", metavar="EXPR", help="all images for which this is true")
    parser.add_argument("--to", metavar="CLASS", help="their class from now on")
    parser.add_argument("--new-classes", action="store_true", help="add classes that the set does not have")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.change import relabel_images
        from lightning_ring.data.sets.tables import read_labels
        from lightning_ring.data.shards.manifest import read_manifest

        labels = None if options.labels is None else read_labels(options.labels)
        before = read_manifest(options.set).generation
        manifest = relabel_images(options.set, labels, options.where, options.to, options.new_classes)
        done = manifest.change if manifest.generation != before else "nothing to do: no such image is of another class"
        print(f"{options.set}: {done}; generation {manifest.generation} has {len(manifest.classes)} classes")
        return 0

    return exit_code("relabel", run, UNCHANGED)
