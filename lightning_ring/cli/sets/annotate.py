"""``lightning-ring annotate``: metadata for the images of a set."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.sets.running import UNCHANGED, exit_code, folder


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged. Raises `ConfigurationError`: the table cannot be read, or names no such image."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring annotate",
        description="Make a generation of a packed set with the columns of a table as metadata: numbers, texts, lists "
        "of either (several labels), or boxes. In a CSV a column of JSON numbers or lists is one; all else is text, "
        "and an empty cell is missing.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("table", type=Path, metavar="TABLE", help=".csv or .parquet, with the column path")
    parser.add_argument("--columns", metavar="A,B", help="only these columns (default: all but path and label)")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.change import annotate_images
        from lightning_ring.data.sets.tables import read_table
        from lightning_ring.data.shards.manifest import read_manifest

        columns = read_table(options.table, options.columns.split(",") if options.columns else None)
        before = read_manifest(options.set).generation
        manifest = annotate_images(options.set, columns)
        done = manifest.change if manifest.generation != before else "nothing to do: it has these values"
        kinds = ", ".join(f"{name} ({kind})" for name, kind in manifest.columns.items())
        print(f"{options.set}: {done}; generation {manifest.generation} has the columns {kinds}")
        return 0

    return exit_code("annotate", run, UNCHANGED)
