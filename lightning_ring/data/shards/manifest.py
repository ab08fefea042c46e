"""The manifest of a folder of shards: its classes, its files with their lengths and checksums.

manifest.json             written last, so a folder without it is not a data set yet
shard-000000.tar ...      WebDataset's layout: 000000012.jpg, then 000000012.cls (the label)
index/000000/*.npy        one row an image, see `lightning_ring.data.shards.index`
index/000000/names.txt    where each image came from, one a line
index/000000/manifest.json  that of this generation, when there are later ones
report.csv                images that were left out, and changes beyond shrinking

Shards and indices never change once they are written. The number in ``index/000000`` is the
generation: `pack --append` writes further shards and the next index, and then renames a manifest
that names them to ``manifest.json``. A generation that is newer than ``manifest.json`` was never
finished, and nobody reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_ring.errors import ShardError

MANIFEST = "manifest.json"
REPORT = "report.csv"
FORMAT = "lightning_ring shards"
STAMPS = "stamps.npy"
VERSION = 3


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file: its length in bytes, its images, and the SHA-256 of the whole file (as
    ``sha256sum``).
    """

    name: str
    bytes: int
    samples: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """
    Args:
        classes: Names of the classes, in the order of their numbers.
        files: SHA-256 of everything beside the shards.
        source: Where the images came from; ``identity`` is of what lay there
            (`packing.sources.Sources.identity`).
        settings: Of the packing.
        counts: Numbers of images by treatment, of the packing that made this generation; for
            people.
        generation: How often images were appended.
    """

    classes: list[str]
    shards: list[Shard]
    files: dict[str, str]
    source: str
    identity: str
    settings: dict[str, Any]
    counts: dict[str, int]
    generation: int = 0

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """The same for two folders if and only if they hold the same images, labels, names and
        order.
        """
        shards = [[shard.name, shard.bytes, shard.samples, shard.sha256] for shard in self.shards]
        # times of files
        files = {name: sha256 for name, sha256 in self.files.items() if not name.endswith(STAMPS)}
        content = [VERSION, self.classes, shards, files]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def index(self) -> str:
        """The folder of the index, in the folder of the shards."""
        return index_folder(self.generation)

    def to_json(self) -> str:
        head = {
            "format": FORMAT,
            "version": VERSION,
            "samples": self.samples,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(head | asdict(self), indent=1, ensure_ascii=True) + "\n"


_OTHERS = ("classes", "files", "source", "identity", "settings", "counts", "generation")


def index_folder(generation: int) -> str:
    return f"index/{generation:06d}"


def generations(root: Path) -> list[int]:
    """The generations of the set in ``root`` that can be opened, the newest last."""
    newest = read_manifest(root).generation
    found = (path.parent.name for path in root.glob(f"index/*/{MANIFEST}"))
    return sorted(
        {newest, *(int(name) for name in found if name.isdecimal() and int(name) < newest)}
    )


def read_manifest(root: Path, generation: int | None = None) -> Manifest:
    """The manifest of the shards in ``root``: of the newest generation, or of the one that is asked
    for.

    Raises `ShardError`: there is none, or it is not one that this version can read.
    """
    newest = _read(root, root / MANIFEST)
    if generation is None or generation == newest.generation:
        return newest
    path = root / index_folder(generation) / MANIFEST
    if generation > newest.generation or not path.exists():
        there = ", ".join(map(str, generations(root)))
        raise ShardError(
            f"{root} has no generation {generation}: it has {there}. Open one of them."
        )
    return _read(root, path)


def _read(root: Path, path: Path) -> Manifest:
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ShardError(f"{path} is not there. {_instead_of_manifest(root)}") from None
    except (ValueError, OSError) as error:
        raise ShardError(
            f"{path} cannot be read: {error}. Restore it, or pack the images again."
        ) from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ShardError(
            f'{path} does not say "format": "{FORMAT}": it was written by another program.'
        )
    if fields["version"] != VERSION:
        found = fields["version"]
        raise ShardError(
            f"{path} has version {found}, expected {VERSION}: pack the images again "
            "with this version."
        )
    try:
        shards = [Shard(**shard) for shard in fields["shards"]]
        manifest = Manifest(shards=shards, **{name: fields[name] for name in _OTHERS})
        if manifest.fingerprint != fields["fingerprint"]:
            raise KeyError("fingerprint (it does not fit the rest: the file was edited or damaged)")
    except (KeyError, TypeError) as error:
        raise ShardError(
            f"{path}: {error} is missing or wrong. Restore the file, or pack the images again."
        ) from None
    return manifest


def _instead_of_manifest(root: Path) -> str:
    if not root.is_dir():
        return "There is no such folder; `lightning-ring pack SRC DST` makes one from images."
    if (root / ".packing").is_dir():
        return (
            "Packing into this folder has not finished: run the same `lightning-ring pack` again, "
            "it goes on."
        )
    return (
        "This is no folder of packed shards; `lightning-ring pack SRC DST` makes one from images."
    )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def check_lengths(root: Path, shards: list[Shard]) -> list[str]:
    """One line for every shard that is missing, or not as long as it was packed; reads no shard."""
    names, found = {shard.name for shard in shards}, {}
    for entry in os.scandir(root):
        if entry.name in names:
            with suppress(FileNotFoundError):  # it is removed just now, or a link to nowhere
                found[entry.name] = entry.stat().st_size
    problems = []
    for shard in shards:
        size = found.get(shard.name)
        if size is None:
            problems.append(f"{root / shard.name} is missing")
        elif size != shard.bytes:
            what = "cut short" if size < shard.bytes else "longer than packed"
            problems.append(
                f"{root / shard.name} is {what}: it has {size} bytes, expected {shard.bytes}"
            )
    return problems
