"""``lightning-ring pack``: image files into shards, and shards checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.host.cores import available_cores

if TYPE_CHECKING:
    from lightning_ring.data.packing.image import PackSettings
    from lightning_ring.data.shards import Manifest


def main(arguments: Sequence[str]) -> int:
    """0; 1 where ``--verify`` found problems, or the disk failed; 130 after Ctrl-C.

    Raises `ConfigurationError`: the command line is wrong, or what it names cannot be packed.
    """
    options = _parser().parse_args(arguments)
    workers = options.workers if options.workers is not None else available_cores()
    if workers < 1:
        raise ConfigurationError(f"--workers {workers}: expected 1 or more.")
    if options.verify and options.append:
        raise ConfigurationError("--verify and --append were given, expected one of them.")
    expected, number = ("DST alone", 1) if options.verify else ("SRC and DST", 2)
    if len(options.paths) != number:
        raise ConfigurationError(
            f"expected {expected}, got {len(options.paths)} paths. See `lightning-ring pack -h`."
        )
    goes_on = "" if options.verify else " The same command goes on after the last finished shard."
    try:
        return _verify(options.paths[0], workers) if options.verify else _pack(options, workers)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "PIL", "simplejpeg", "tqdm"):
            raise
        raise ConfigurationError(
            f"{error.name} is not installed. Run `pip install 'lightning-ring[data]'`."
        ) from None
    except KeyboardInterrupt:
        print(f"\nlightning-ring pack: stopped.{goes_on}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        problem = f"{where}{error.strerror or error}.{goes_on}"
    except ShardError as error:
        problem = str(error)
    print(f"lightning-ring pack: {problem}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring pack",
        usage="%(prog)s [options] SRC DST\n       %(prog)s --append [options] SRC DST\n       "
        "%(prog)s --verify DST",
        description="Pack images into tar shards in WebDataset's layout, with an index for "
        "random access (lightning_ring.data.ShardDataset). SRC is a folder with a folder for "
        "each class, or a CSV file with the columns path and label. What cannot be packed is "
        "left out and listed in DST/report.csv.",
        epilog="Images whose shorter side is at most --size are copied byte for byte. Started "
        "again after an interruption, the same command goes on after the last finished shard. "
        "--append leaves out images whose names the set has, and takes the set's settings for "
        "those that are not given. New classes get the next numbers.",
    )
    add = parser.add_argument
    add("paths", nargs="+", type=_folder, metavar="SRC DST", help=argparse.SUPPRESS)
    add("--verify", action="store_true", help="read all of DST and compare it with its checksums")
    add("--append", action="store_true", help="add SRC to the set in DST, or make one")
    add("--size", type=int, help="shrink to this shorter side, 0: never (default: 256)")
    add("--shard-mb", type=float, metavar="MIB", help="largest shard (default: 256)")
    add("--quality", type=int, help="of JPEGs that are encoded anew (default: 90)")
    add(
        "--group-by-class",
        action="store_true",
        default=None,
        help="keep classes together (default: mixed, seeded)",
    )
    add(
        "--classes",
        type=Path,
        metavar="FILE",
        help="number classes as the lines of this file, or as the manifest.json of other shards "
        "(default: by name)",
    )
    add(
        "--upright",
        action="store_true",
        default=None,
        help="turn images by their EXIF orientation (default: leave them, as torchvision's "
        "ImageFolder does)",
    )
    add("--workers", type=int, metavar="N", help="threads (default: one a core); changes no byte")
    return parser


def _folder(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, expected a folder. Pack into a folder, and copy it there."
        )
    return Path(text)


def _verify(root: Path, workers: int) -> int:
    """List what is damaged; 1 if that is anything."""
    # deferred: --help needs neither numpy nor Pillow
    from lightning_ring.data.shards import read_manifest, verify

    manifest = read_manifest(root)
    with _bar("byte", "reading") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        problems = verify(root, workers, progress)
    for problem in problems:
        print(problem)
    if problems:
        print(
            f"{root}: {_count(len(problems), 'problem')}. Restore these files, or pack the images "
            "again.",
            file=sys.stderr,
        )
        return 1
    print(
        f"{root}: {_count(manifest.samples, 'image')} in {_count(len(manifest.shards), 'shard')}, "
        "all as they were packed."
    )
    return 0


def _pack(options: argparse.Namespace, workers: int) -> int:
    source, target = options.paths
    from lightning_ring.data.packing.run import pack
    from lightning_ring.data.packing.sources import read_classes

    classes = read_classes(options.classes) if options.classes else None
    settings = _settings(options, target)
    with _bar("image", "listing") as bar:

        def progress(done: int, total: int, left_out: int) -> None:
            if bar.total is None:
                bar.reset(total)
                bar.set_description("packing", refresh=False)
                bar.initial = bar.n = done - 1  # those of an earlier start are no work of this one
            bar.set_postfix({"left out": left_out}, refresh=False)
            bar.update(done - bar.n)

        manifest = pack(source, target, settings, workers, progress, classes, options.append)
    _summarise(manifest, target)
    return 0


def _settings(options: argparse.Namespace, target: Path) -> PackSettings:
    """What was given; the rest as the set in ``target`` has it, if images are appended to one,
    else the defaults.
    """
    from lightning_ring.data.packing.image import PackSettings
    from lightning_ring.data.shards import MANIFEST, read_manifest

    appends = options.append and (target / MANIFEST).exists()
    found = dict(read_manifest(target).settings) if appends else {}
    for name in (field.name for field in fields(PackSettings)):
        if (given := getattr(options, name)) is not None:
            found[name] = given
    return PackSettings(**found)


def _bar(unit: str, doing: str) -> Any:
    """A progress bar; nothing is shown where standard error is no terminal."""
    from tqdm import tqdm

    return tqdm(
        desc=doing, unit=f" {unit}s", unit_scale=unit == "byte", dynamic_ncols=True, disable=None
    )


def _summarise(manifest: Manifest, target: Path) -> None:
    from lightning_ring.data.packing.run import NOT_ADDED

    counts = manifest.counts
    size = sum(shard.bytes for shard in manifest.shards) / 2**20
    treated = ("copied", "shrunk", "turned", "converted")
    done = ", ".join(f"{counts[how]} {how}" for how in treated if counts[how]) or "nothing to do"
    print(
        f"{target}: {_count(manifest.samples, 'image')} of "
        f"{_count(len(manifest.classes), 'class')} in {_count(len(manifest.shards), 'shard')}, "
        f"{size:.1f} MiB ({done})"
    )
    if "added" in counts:
        print(
            f"generation {manifest.generation}: {_count(counts['added'], 'image')} added, "
            f"{counts['there']} were there already"
        )
    if number := counts["not turned"]:
        print(
            f"not turned: {_count(number, 'image')} with an EXIF orientation; --upright turns them"
        )
    report = f"{manifest.index}/report.csv" if manifest.generation else "report.csv"
    if counts.get("added") == 0:
        report = NOT_ADDED
    for what in ("left out", "empty classes", "converted"):
        if number := counts.get(what, 0):
            print(f"{what}: {number}, listed in {target / report}")


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
