"""``lightning-ring index``: photographs embedded, to be found by ``lightning-ring identify``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.arguments import check_output, import_from_here
from lightning_ring.cli.sets.running import exit_code
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_names import printable

MOST_NAMED = 20  # photographs that are left out


def main(arguments: Sequence[str]) -> int:
    """Raises `ConfigurationError`: the command line is wrong, or the checkpoint or the folder cannot be used."""
    options = _parser().parse_args(arguments)
    for option, value in (("--size", options.size), ("--resize", options.resize)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{option} {value}: expected 1 or more.")
    check_output("-o", options.output, inputs=[options.checkpoint])
    return exit_code("index", lambda: _index(options), "There is no index, or it is as it was.")


def _index(options: argparse.Namespace) -> int:
    import_from_here()
    from lightning_ring.retrieval.photos.embedder import PhotoEmbedder  # here: torch takes seconds
    from lightning_ring.retrieval.photos.index import PhotoIndex

    model = PhotoEmbedder.of(options.checkpoint, options.model, options.size, options.resize)
    index, left_out = PhotoIndex.build(model, options.folder, _progress)
    index.save(options.output)
    for name, reason in list(left_out.items())[:MOST_NAMED]:
        print(printable(f"left out: {name}: {reason}"), file=sys.stderr)
    if len(left_out) > MOST_NAMED:
        print(f"left out: {len(left_out) - MOST_NAMED} more", file=sys.stderr)
    print(f"{options.output}: {len(index.files)} photographs" + (f", {len(left_out)} left out" if left_out else ""))
    return 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} photographs", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring index",
        description="Embed all photographs below a folder with a trained model, on the CPU. Those in a folder are of "
        "one class, named like the folder; a folder without folders will do too.",
        epilog="The model is a LightningModule that calls save_hyperparameters() and whose forward takes images "
        "[batch, 3, height, width], normalised by ImageNet's mean and standard deviation, and gives embeddings "
        "[batch, size]. Checkpoints of recipes/train.py and of LightningCLI name their class, and those of the recipes "
        "the size of their images. A checkpoint names code that is run: use only those that you trust.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="that Lightning's Trainer saved")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of photographs")
    parser.add_argument(
        "-o", "--output", type=Path, default="photographs.index", metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--model", metavar="MODULE:CLASS", help="of the checkpoint's model (default: what the checkpoint names)"
    )
    parser.add_argument(
        "--size", type=int, metavar="PIXELS", help="a side of the model's images (default: as in training)"
    )
    parser.add_argument(
        "--resize",
        type=int,
        metavar="PIXELS",
        help="the shorter side, before the centre is cut out (default: as in training, or --size)",
    )
    return parser
