"""``lightning-ring delete``: images taken out of a set."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.sets.running import UNCHANGED, count, exit_code, folder
from lightning_ring.errors import ConfigurationError


def main(arguments: Sequence[str]) -> int:
    """0; 1 where the set is damaged. Raises `ConfigurationError`: there is no such image."""
    parser = argparse.ArgumentParser(
        prog="lightning-ring delete",
        description="Make a generation of a packed set without some images. Their bytes stay in the shards, for "
        "readers of older generations; `lightning-ring prune` removes shards that no generation has.",
    )
    parser.add_argument("set", type=folder, metavar="SET", help="folder of packed images")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an image, as `lightning-ring ls` shows it")
    parser.add_argument("--where", metavar="EXPR", help="all images for which this is true: \"class_name == 'spam'\"")
    parser.add_argument("--names-from", type=Path, metavar="FILE", help="a name a line")
    options = parser.parse_args(arguments)
    names = list(options.names)
    if options.names_from:
        names += read_names(options.names_from)
    if not names and options.where is None:
        raise ConfigurationError("no image was named. Expected names, --names-from FILE or --where EXPR.")

    def run() -> int:
        from lightning_ring.data.sets.change import delete_images
        from lightning_ring.data.shards.manifest import read_manifest

        before = read_manifest(options.set).generation
        manifest = delete_images(options.set, options.where, names)
        done = manifest.change if manifest.generation != before else "nothing to do: there is no such image"
        print(f"{options.set}: {done}; generation {manifest.generation} has {count(manifest.samples, 'image')}")
        return 0

    return exit_code("delete", run, UNCHANGED)


def read_names(file: Path) -> list[str]:
    """Raises `ConfigurationError`: ``file`` cannot be read."""
    try:
        return [line for line in file.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if line]
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}. Expected a name in each line.") from None
