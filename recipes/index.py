"""Embeds photographs, to be found by ``recipes/identify.py``: ``python recipes/index.py CHECKPOINT FOLDER``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: make `recipes` importable, instead of this folder's modules at the top level
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lightning_ring.cli.arguments import check_output
from lightning_ring.errors import RingError


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        output = Path(options.output)
        check_output("-o", output)
        from recipes.recognition.photo_index import PhotoIndex  # here: torch takes seconds
        from recipes.recognition.photos import PhotoEmbedder

        index, left_out = PhotoIndex.build(PhotoEmbedder.of(options.checkpoint), Path(options.folder), _progress)
        index.save(output)
    except RingError as error:
        raise SystemExit(f"index.py: {error}") from None
    for name, reason in list(left_out.items())[:20]:
        print(f"left out: {name}: {reason}", file=sys.stderr)
    if len(left_out) > 20:
        print(f"left out: {len(left_out) - 20} more", file=sys.stderr)
    print(f"{output}: {len(index.files)} photographs" + (f", {len(left_out)} left out" if left_out else ""))


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} photographs", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python recipes/index.py",
        description="Embed all photographs below a folder with a trained recogniser. Those in a folder are of one "
        "class, named like the folder; a folder without folders will do too.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="where recipes/train.py left it")
    parser.add_argument("folder", metavar="FOLDER", help="of photographs")
    parser.add_argument("-o", "--output", default="photographs.index", metavar="FILE", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
