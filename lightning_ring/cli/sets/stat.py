"""``lightning-ring stat``: what a set holds, and how it came about."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_ring.cli.sets.running import count, exit_code, folder

if TYPE_CHECKING:
    from lightning_ring.data.sets.statistics import Statistics

_SHOWN = 10


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring stat",
        description="What a packed set holds: images, classes, metadata, bytes, and its generations. Reads no image.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("--generation", type=int, metavar="N", help="of the set (default: the newest)")
    parser.add_argument("--classes", action="store_true", help="all classes, not the largest alone")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    options = parser.parse_args(arguments)

    def run() -> int:
        from lightning_ring.data.sets.statistics import statistics

        found = statistics(options.set, options.generation)
        print(json.dumps(asdict(found), indent=1) if options.json else _text(found, options.classes))
        return 0

    return exit_code("stat", run, "")


def _text(found: Statistics, all_classes: bool) -> str:
    mib = 2**20
    lines = [
        f"{found.root}: generation {found.generation}",
        f"  {count(found.images, 'image')} of {count(len(found.classes), 'class')} in {count(found.shards, 'shard')}",
        f"  {found.bytes / mib:.1f} MiB of images; {found.disk_bytes / mib:.1f} MiB of shards, all generations",
    ]
    if found.deleted:
        lines.append(f"  {count(found.deleted, 'deleted image')} in these shards still")
    if found.unfinished:
        lines.append("  an append has not finished: start it again, or `lightning-ring prune --unfinished`")
    for name, column in found.columns.items():
        lines.append(f"  column {name}: {column}")
    lines.append("classes:")
    ranked = sorted(found.classes.items(), key=lambda item: -item[1])
    shown = ranked if all_classes or len(ranked) <= _SHOWN else ranked[:_SHOWN]
    lines += [f"  {number:9}  {name}" for name, number in shown]
    if len(shown) < len(ranked):
        least = ranked[-1]
        lines.append(
            f"  and {len(ranked) - len(shown)} more, the smallest {least[0]!r} with {least[1]} (--classes: all)"
        )
    lines.append("generations:")
    lines += [f"  {number:9}  {images} images  {change}" for number, images, change in found.generations]
    return "\n".join(lines)
