"""``lightning-ring identify``: the photographs of an index that are most similar to others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.arguments import check_output, import_from_here
from lightning_ring.cli.sets.running import exit_code
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_names import printable


def main(arguments: Sequence[str]) -> int:
    """Raises `ConfigurationError`: the command line is wrong, or a photograph or the index cannot be used."""
    options = _parser().parse_args(arguments)
    if options.k < 1:
        raise ConfigurationError(f"-k {options.k}: expected 1 or more.")
    checkpoints = [] if options.checkpoint is None else [options.checkpoint]
    check_output("-o", options.output, inputs=[*options.photos, options.index, *checkpoints])
    return exit_code("identify", lambda: _identify(options), "There is no page, or it is as it was.")


def _identify(options: argparse.Namespace) -> int:
    import_from_here()
    from lightning_ring.data.packing.files import write_whole
    from lightning_ring.retrieval.photos.index import PhotoIndex  # here: torch takes seconds
    from lightning_ring.retrieval.photos.page import page_of

    index = PhotoIndex.load(options.index)
    model = index.model(options.checkpoint)
    found = index.find(model, options.photos, options.k, again=options.rerank)
    for photo, others in zip(options.photos, found, strict=True):
        print(printable(photo))
        for number, other in enumerate(others, start=1):
            print(printable(f"  {number}. {other.similarity:.3f}  {other.label or '-'}  {other.file}"))
    page = page_of(options.photos, found, len(index.files), model.checkpoint)
    write_whole(options.output, page.encode())
    print(f"page: {options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring identify",
        description="Find the photographs of an index (`lightning-ring index`) that are most similar to others, print "
        "them, and write an HTML page of them, which needs no network.",
    )
    parser.add_argument("photos", nargs="+", type=Path, metavar="PHOTO")
    parser.add_argument(
        "-i", "--index", type=Path, default="photographs.index", metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("-k", type=int, default=5, metavar="K", help="photographs to find (default: %(default)s)")
    parser.add_argument("--rerank", action="store_true", help="order them by the neighbours that they share, too")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="of the index's model, if it was moved")
    parser.add_argument(
        "-o", "--output", type=Path, default="identified.html", metavar="FILE", help="default: %(default)s"
    )
    return parser
