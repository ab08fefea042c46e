"""``lightning-ring ls``: the images of a set, as CSV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_ring.cli.sets.running import exit_code, folder, number


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged. Raises `ConfigurationError`: ``--where`` or ``--columns`` are wrong."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring ls",
        description="List the images of a packed set as CSV: path, label, and its metadata. `lightning-ring relabel` "
        "and `lightning-ring annotate` read such a table back.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("--where", metavar="EXPR", help='only images for which this is true, such as "width > 300"')
    parser.add_argument("--columns", metavar="A,B", help="only this metadata (default: all)")
    parser.add_argument("--generation", type=int, metavar="N", help="of the set (default: the newest)")
    parser.add_argument("--limit", type=number, metavar="N", help="at most so many images")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.tables import write_table

        columns = options.columns.split(",") if options.columns else None
        write_table(sys.stdout, options.set, options.where, columns, options.generation, options.limit)
        return 0

    return exit_code("ls", run, "")
