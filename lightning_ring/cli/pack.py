"""``lightning-ring pack``: image files into shards, and shards checked."""

from __future__ import annotations

import argparse
import csv
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ring.cli.sets.check import check
from lightning_ring.cli.sets.running import count, exit_code
from lightning_ring.cli.sets.verify import verify_set
from lightning_ring.data.remote.options import is_url
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores

if TYPE_CHECKING:
    from lightning_ring.data.packing.settings import PackSettings
    from lightning_ring.data.shards.manifest import Manifest


def main(arguments: Sequence[str]) -> int:
    """0; 1 where ``--verify`` found problems, or the disk or the store failed; 130 after Ctrl-C.

    Raises `ConfigurationError`: the command line is wrong, or what it names cannot be packed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    workers = options.workers if options.workers is not None else available_cores()
    if workers < 1:
        raise ConfigurationError(f"--workers {workers}: expected 1 or more.")
    chosen = [name for name in ("verify", "check", "append") if getattr(options, name)]
    if len(chosen) > 1:
        raise ConfigurationError(f"--{chosen[0]} and --{chosen[1]} were given, expected one of them.")

    if not options.verify:
        for url in filter(is_url, options.paths):
            raise ConfigurationError(f"{url} is a URL, expected a folder. Pack into a folder, and copy it there.")

    def run() -> int:
        if options.verify:
            with _bar("byte", "reading") as bar:
                return verify_set(options.paths, workers, bar)
        if options.check:
            with _bar("image", "looking") as bar:
                return check(options, workers, bar)
        return _pack(options, workers)

    packs = not options.verify and not options.check
    return exit_code("pack", run, "The same command goes on after the last finished shard." if packs else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring pack",
        usage="%(prog)s [options] SRC DST\n       %(prog)s --append [options] SRC DST\n       %(prog)s --verify DST\n"
        "       %(prog)s --check DST [DST ...]",
        description="Pack images into tar shards in WebDataset's layout, with an index for random access "
        "(lightning_ring.data.ShardDataset). SRC is a folder with a folder for each class, or a CSV file with the "
        "columns path and label. What cannot be packed is left out and listed in DST/report.csv.",
        epilog="Images whose shorter side is at most --size are copied byte for byte. Started again after an "
        "interruption, the same command goes on after the last finished shard. --append leaves out images whose names "
        "the set has or that were deleted from it, and takes the set's settings for those that are not given. New "
        "classes get the next numbers.",
    )
    parser.add_argument("paths", nargs="+", type=_path_or_url, metavar="SRC DST", help=argparse.SUPPRESS)
    parser.add_argument(
        "--verify", action="store_true", help="read all of DST, a folder or a URL, and compare it with its checksums"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="list images of sets that are there twice, look alike, or are in two splits, as CSV",
    )
    parser.add_argument(
        "--distance",
        type=int,
        default=4,
        metavar="BITS",
        help="of --check: alike are hashes of 64 bits that differ in so many at most (default: 4)",
    )
    parser.add_argument("--exact", action="store_true", help="of --check: equal bytes alone")
    parser.add_argument(
        "--split-by", metavar="COLUMN", help="of --check: metadata that names the split (default: the set)"
    )
    parser.add_argument("--append", action="store_true", help="add SRC to the set in DST, or make one")
    parser.add_argument("--keep-known", action="store_true", help="with --append: the set is right where SRC differs")
    parser.add_argument("--restore", action="store_true", help="with --append: also images that were deleted")
    parser.add_argument(
        "--prefix", default="", metavar="TEXT", help="put before the name of every image: '2026-11-23/'"
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="pack part I of N; the last one to end makes the set. `ranks`: the part of this rank of mpirun or srun",
    )
    parser.add_argument("--size", type=int, help="shrink to this shorter side, 0: never (default: 256)")
    parser.add_argument("--shard-mb", type=float, metavar="MIB", help="largest shard (default: 256)")
    parser.add_argument("--quality", type=int, help="of JPEGs that are encoded anew (default: 90)")
    parser.add_argument(
        "--group-by-class", action="store_true", default=None, help="keep classes together (default: mixed, seeded)"
    )
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="number classes as the lines of this file, or as the manifest.json of other shards (default: by name)",
    )
    parser.add_argument(
        "--upright",
        action="store_true",
        default=None,
        help="turn images by their EXIF orientation (default: leave them, as torchvision's ImageFolder does)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one a core); changes no byte")
    return parser


def _path_or_url(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _pack(options: argparse.Namespace, workers: int) -> int:
    if len(options.paths) != 2:
        raise ConfigurationError(f"expected SRC and DST, got {len(options.paths)} paths. See `lightning-ring pack -h`.")
    source, target = options.paths
    from lightning_ring.data.packing.classes import read_classes  # deferred: --help needs neither numpy nor Pillow
    from lightning_ring.data.packing.job import PackJob
    from lightning_ring.data.packing.run import run_job

    if not options.append and (options.keep_known or options.restore):
        raise ConfigurationError("--keep-known and --restore go with --append.")
    part, parts = _part(options.part)
    classes = read_classes(options.classes) if options.classes else None
    settings = _settings(options, target)
    job = PackJob(
        source,
        target,
        settings,
        classes,
        append=options.append,
        prefix=options.prefix,
        keep_known=options.keep_known,
        restore=options.restore,
        part=part - 1,
        parts=parts,
    )
    with _bar("image", "listing") as bar:

        def progress(done: int, total: int, left_out: int) -> None:
            if bar.total is None:
                bar.reset(total)
                bar.set_description("packing", refresh=False)
                bar.initial = bar.n = done - 1  # those of an earlier start are no work of this one
            bar.set_postfix({"left out": left_out}, refresh=False)
            bar.update(done - bar.n)

        manifest = run_job(job, workers, progress)
    if manifest is None:
        print(f"{target}: part {part} of {parts} is packed; the last part to end makes the set")
    else:
        _summarise(manifest, target)
    return 0


def _settings(options: argparse.Namespace, target: Path) -> PackSettings:
    """What was given; the rest as the set in ``target`` has it, if images are appended to one, else the defaults."""
    from lightning_ring.data.packing.settings import PackSettings
    from lightning_ring.data.shards.manifest import MANIFEST, read_manifest

    names = [field.name for field in fields(PackSettings)]
    found = read_manifest(target).settings if options.append and (target / MANIFEST).exists() else {}
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return PackSettings(**{name: found[name] for name in names if name in found} | given)


def _part(text: str | None) -> tuple[int, int]:
    """Part number (from 1) and parts.

    Raises `ConfigurationError`: ``text`` is neither ``I/N`` nor ``ranks`` in a process that a launcher started.
    """
    if text is None:
        return 1, 1
    if text == "ranks":
        from lightning_ring.job.launchers import launcher_variables

        found = launcher_variables(os.environ)
        if found is None:
            raise ConfigurationError(
                "--part ranks: no launcher started this process. Use mpirun or srun, or --part I/N."
            )
        return found.rank + 1, found.world_size
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigurationError(f"--part {text}: expected I/N, with I from 1 to N, or ranks.")
    return int(match[1]), int(match[2])


def _bar(unit: str, doing: str) -> Any:
    """A progress bar; nothing is shown where standard error is no terminal."""
    from tqdm import tqdm

    return tqdm(desc=doing, unit=f" {unit}s", unit_scale=unit == "byte", dynamic_ncols=True, disable=None)


def _summarise(manifest: Manifest, target: Path) -> None:
    from lightning_ring.data.packing.run import NOT_ADDED

    counts = manifest.counts
    size = sum(shard.bytes for shard in manifest.shards) / 2**20
    treated = ("copied", "shrunk", "turned", "converted")
    done = ", ".join(f"{counts[how]} {how}" for how in treated if counts[how]) or "nothing to do"
    print(
        f"{target}: {count(manifest.samples, 'image')} of {count(len(manifest.classes), 'class')} "
        f"in {count(len(manifest.shards), 'shard')}, "
        f"{size:.1f} MiB ({done})"
    )
    if "added" in counts:
        added, there = count(counts["added"], "image"), counts["there"]
        print(f"generation {manifest.generation}: {added} added, {there} were there already, or deleted")
    if number := counts["not turned"]:
        print(f"not turned: {count(number, 'image')} with an EXIF orientation; --upright turns them")
    report = target / (f"{manifest.index}/report.csv" if manifest.generation else "report.csv")
    if counts.get("added") == 0:
        report = target / NOT_ADDED
    for what in ("left out", "empty class", "converted"):
        number = counts.get("empty classes" if what == "empty class" else what, 0)
        if number:
            print(f"{what}: {number}, listed in {report}")
            with open(report, newline="", encoding="utf-8", errors="backslashreplace") as rows:
                for row in islice((row for row in csv.reader(rows) if row[0] == what), 3):
                    print(f"  {row[1]}: {row[2]}")
