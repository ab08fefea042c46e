"""Finds the photographs that are most similar to others: ``python recipes/identify.py photo.jpg``."""

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
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.k < 1:
        parser.error(f"-k {options.k}: expected 1 or more")
    try:
        page = Path(options.output)
        check_output("-o", page)
        from recipes.recognition.page import page_of  # here: torch takes seconds
        from recipes.recognition.photo_index import PhotoIndex
        from recipes.recognition.photos import PhotoEmbedder

        index = PhotoIndex.load(Path(options.index))
        photos = [Path(photo) for photo in options.photos]
        model = PhotoEmbedder.of(options.checkpoint or index.checkpoint)
        found = index.find(model, photos, options.k, again=options.rerank)
    except RingError as error:
        raise SystemExit(f"identify.py: {error}") from None
    for photo, others in zip(photos, found, strict=True):
        print(photo)
        for number, other in enumerate(others, start=1):
            print(f"  {number}. {other.similarity:.3f}  {other.label or '-'}  {other.file}")
    page.write_text(page_of(photos, found, len(index.files), model.checkpoint), encoding="utf-8")
    print(f"page: {page}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python recipes/identify.py",
        description="Find the photographs of an index (recipes/index.py) that are most similar to others, print them, "
        "and write an HTML page of them, which needs no network.",
    )
    parser.add_argument("photos", nargs="+", metavar="PHOTO")
    parser.add_argument("-i", "--index", default="photographs.index", metavar="FILE", help="default: %(default)s")
    parser.add_argument("-k", type=int, default=5, metavar="K", help="photographs to find (default: %(default)s)")
    parser.add_argument("--rerank", action="store_true", help="order them by the neighbours that they share, too")
    parser.add_argument("--checkpoint", metavar="FILE", help="where the index's model is now, if it was moved")
    parser.add_argument("-o", "--output", default="identified.html", metavar="FILE", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
