"""Shards as they lie in a folder: plain tars in WebDataset's layout, an index beside them
for random access, and a manifest with the lengths and checksums of both.

manifest.json             written last, so a folder without it is not a data set yet
shard-000000.tar ...      WebDataset's layout: 000000012.jpg, then 000000012.cls (the label)
index/000000/*.npy        one row an image, see below
index/000000/names.txt    where each image came from, one a line
index/000000/manifest.json  that of this generation, when there are later ones
report.csv                images that were left out, and changes beyond shrinking

Shards and indices never change once they are written. The number in ``index/000000`` is the
generation: `pack --append` writes further shards and the next index, and then renames a manifest
that names them to ``manifest.json``. A generation that is newer than ``manifest.json`` was never
finished, and nobody reads it.


The index is arrays of one row an image, memory-mapped, so that all processes of a host
share them.

    labels.npy     int32    class number                                           4 bytes an image
    places.npy     uint32   where the image starts in its shard, in blocks of 512 bytes; its length
                            in bytes; the CRC-32 of its bytes                     12
    name_ends.npy  int64    where its name ends in names.txt                       8
    stamps.npy     uint64   of the file that it was packed from, for repacking     8

Tar places every file at a multiple of 512 bytes, so 32 bits reach to 2 TiB in a shard. Which shard
an image is in follows from its number and the manifest.

No damage of an index is read for what was packed. Labels are compared with their SHA-256 when they
are opened, names when the first one is asked for. A damaged place leads to bytes that have not the
CRC-32 of the place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cached_property, lru_cache
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from lightning_ring.errors import ShardError, ShardLostError
from lightning_ring.host import most_open_files

MANIFEST = "manifest.json"
REPORT = "report.csv"
VERSION = 3
_HEAD = {"format": "lightning_ring shards", "version": VERSION}


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
        # not the times of files
        files = {name: sha for name, sha in self.files.items() if not name.endswith("stamps.npy")}
        content = [VERSION, self.classes, [astuple(shard) for shard in self.shards], files]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def index(self) -> str:
        """The folder of the index, in the folder of the shards."""
        return index_folder(self.generation)

    def to_json(self) -> str:
        head = _HEAD | {"samples": self.samples, "fingerprint": self.fingerprint}
        return json.dumps(head | asdict(self), indent=1) + "\n"


NO_SET = Manifest([], [], {}, source="", identity="", settings={}, counts={}, generation=-1)
"""What the first images of a set are added to."""

# It leads nowhere but into the folder.
_PATH = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*")


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
        what_next = (
            "Packing into this folder has not finished: run the same `lightning-ring pack` again, "
            "it goes on."
            if (root / ".packing").is_dir()
            else "`lightning-ring pack SRC DST` makes a folder of packed shards from images."
        )
        raise ShardError(f"{path} is not there. {what_next}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ShardError(
            f"{path} cannot be read: {error}. Restore it, or pack the images again."
        ) from None
    found = {name: fields.get(name) for name in _HEAD} if isinstance(fields, dict) else {}
    if found != _HEAD:
        raise ShardError(f"{path} has {found}, expected {_HEAD}: pack the images again.")
    try:
        values = {name: fields[name] for name in asdict(NO_SET)}
        values["shards"] = [Shard(**shard) for shard in values["shards"]]
        manifest = Manifest(**values)
        _check_values(manifest)
        if manifest.fingerprint != fields["fingerprint"]:
            raise KeyError("fingerprint (it does not fit the rest: the file was edited or damaged)")
    except (KeyError, TypeError) as error:
        raise ShardError(
            f"{path}: {error} is missing or wrong. Restore the file, or pack the images again."
        ) from None
    return manifest


def _check_values(manifest: Manifest) -> None:
    """Raises `KeyError`: a value that somebody may have written who means harm."""
    for name, empty in asdict(NO_SET).items():
        if type(getattr(manifest, name)) is not type(empty):
            raise KeyError(name)
    shards = manifest.shards
    numbers = [shard.bytes for shard in shards] + [shard.samples for shard in shards]
    for number in (*numbers, manifest.generation):
        if type(number) is not int or not 0 <= number < 2**48:
            raise KeyError(f"a number ({number!r:.80})")
    for text in (*manifest.classes, *manifest.files.values(), *(shard.sha256 for shard in shards)):
        if type(text) is not str:
            raise KeyError(f"a text ({text!r:.80})")
    for file in (*manifest.files, *(shard.name for shard in shards)):
        if type(file) is not str or not _PATH.fullmatch(file):
            raise KeyError(f"the name of a file ({file!r:.80}), expected one in this folder,")
    index = (f"{manifest.index}/{name}" for name in INDEX_FILES)
    if missing := {REPORT, *index} - manifest.files.keys():
        raise KeyError(f"the checksum of {min(missing)}")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def damage(path: Path, sha256: str) -> str:
    """What is wrong with a file that had this SHA-256; empty if nothing is."""
    try:
        found = file_sha256(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found == sha256:
        return ""
    return f"{path} is not as it was packed: it has SHA-256 {found}, expected {sha256}"


def check_lengths(root: Path, shards: list[Shard]) -> list[str]:
    """One line for every shard that is missing, or not as long as it was packed; reads no shard."""
    problems = []
    for shard in shards:
        path = root / shard.name
        try:
            size = path.stat().st_size
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if size != shard.bytes:
            what = "cut short" if size < shard.bytes else "longer than packed"
            problems.append(f"{path} is {what}: it has {size} bytes, expected {shard.bytes}")
    return problems


BLOCK = 512
NAMES = "names.txt"
# dtype and shape of a row
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "labels": ("int32", ()),
    "places": ("uint32", (3,)),
    "name_ends": ("int64", ()),
    "stamps": ("uint64", ()),
}
INDEX_FILES = (NAMES, *(f"{column}.npy" for column in COLUMNS))


def _map_array(path: Path) -> npt.NDArray[Any]:
    with open(path, "rb") as file:
        magic = file.read(8)
    # A header of a later version may say that it is 4 GiB long.
    if magic != b"\x93NUMPY\1\0":
        raise ValueError(f"it begins with {magic!r}, expected an array of numpy, version 1.0")
    return np.lib.format.open_memmap(path, mode="r")


class ByteRange(NamedTuple):
    """``size`` bytes from byte ``offset`` of shard number ``shard``, and their CRC-32."""

    shard: int
    offset: int
    size: int
    crc32: int


class ShardIndex:
    """The arrays of the shards in ``root``. Labels are read when it is opened, the rest when it is
    asked for.

    Raises `ShardError`: a file is missing, has another shape, or its labels are not those that were
    packed.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._folder = root / manifest.index
        self._manifest = manifest
        self._starts = list(accumulate((shard.samples for shard in manifest.shards), initial=0))
        self.labels = self.column("labels")
        self.check("labels.npy")
        self._places = self.column("places")

    def column(self, name: str) -> npt.NDArray[Any]:
        """One array, mapped read-only.

        Raises `ShardError`: the file is missing, is no such array, or has not one row an image.
        """
        values = self._mapped(f"{name}.npy", _map_array)
        dtype, row = COLUMNS[name]
        shape = len(self), *row
        if values.shape != shape or values.dtype != dtype:
            raise ShardError(
                f"{self._folder / name}.npy holds {values.dtype} of shape {values.shape}, expected "
                f"{dtype} of shape {shape}, one row for each image of the manifest. Restore it, or "
                "pack the images again."
            )
        return values

    @cached_property
    def names(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """All names, a byte between any two, and where each of them ends."""
        ends = self.column("name_ends")
        names = self._mapped(NAMES, lambda path: np.memmap(path, np.uint8, "r"))
        self.check("name_ends.npy")
        self.check(NAMES)
        return names, ends

    def _mapped(self, name: str, load: Callable[[Path], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        path = self._folder / name
        try:
            # A plain array over the same mapping: indexing a np.memmap costs several times as much.
            return load(path).view(np.ndarray)
        # numpy's parser of headers raises of every kind
        except Exception as error:
            raise ShardError(
                f"{path} cannot be mapped: {error}. Restore it, or pack the images again."
            ) from None

    def check(self, name: str) -> None:
        """Raises `ShardError`: this file of the index is not as it was written."""
        sha256 = self._manifest.files[f"{self._manifest.index}/{name}"]
        if problem := damage(self._folder / name, sha256):
            raise ShardError(f"{problem}. Restore it, or pack the images again.")

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, i: SupportsIndex) -> ByteRange:
        i = range(len(self))[i]
        block, size, crc32 = self._places[i].tolist()
        shard = bisect_right(self._starts, i) - 1
        end = self._manifest.shards[shard].bytes
        # the CRC-32 of no bytes is 0: a page of zeros would pass for an image
        if not 0 < size <= end - block * BLOCK:
            raise ShardError(
                f"{self._folder / 'places.npy'} is damaged: image {i} has {size} bytes at "
                f"{block * BLOCK} in it, and its shard ends at {end}. Restore it."
            )
        return ByteRange(shard, block * BLOCK, size, crc32)

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: a path as the image folder or the CSV had it."""
        i = range(len(self))[i]
        names, ends = self.names
        start = int(ends[i - 1]) + 1 if i else 0
        return names[start : int(ends[i])].tobytes().decode("utf-8", "surrogateescape")


class _OpenFile(FileIO):
    """A file that closes when the last thread that uses it lets go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if hasattr(os, "posix_fadvise"):  # Linux; without it each small read would fetch 128 KiB
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        self.close()


class ShardFiles:
    """Reads bytes of shards. Files open when they are first needed and share no position, so
    threads need no lock.

    A data set keeps as many files open as an eighth of the process's limit.
    """

    def __init__(self, root: Path, shards: Sequence[Shard]) -> None:
        self._root = root
        self._shards = shards

        # It does not refer to `self`, so that the files close with it.
        @lru_cache(max(1, most_open_files() // 8))
        def opened(shard: int) -> _OpenFile:
            return _OpenFile(root / shards[shard].name)

        self._file = opened

    def read(self, place: ByteRange) -> bytes:
        """The bytes at ``place``, in one system call, without the GIL. Their CRC-32 is the caller's
        to compare.

        Raises `ShardLostError`: the file is gone, ends before, or the disk fails.
        """
        try:
            file = self._file(place.shard)  # held: another thread may push it out meanwhile
            data = os.pread(file.fileno(), place.size, place.offset)
        except OSError as error:
            raise ShardLostError(
                f"{self.path(place.shard)} cannot be read at offset {place.offset}, {place.size} "
                f"bytes: {error.strerror}. Restore the file. Look after the disk or the network "
                "file system, then start the job again."
            ) from error
        if len(data) != place.size:
            shard = self._shards[place.shard]
            raise ShardLostError(
                f"{self.path(place.shard)} is cut short: at offset {place.offset} it has "
                f"{len(data)} bytes, expected {place.size}. Restore the file ({shard.bytes} bytes, "
                f"SHA-256 {shard.sha256})."
            )
        return data

    def will_need(self, places: Sequence[ByteRange]) -> None:
        """Tell the kernel to start reading ``places``, all at once; returns before it has."""
        if not hasattr(os, "posix_fadvise"):
            return
        for place in places:
            with suppress(OSError):  # `read` raises it
                file = self._file(place.shard)
                os.posix_fadvise(file.fileno(), place.offset, place.size, os.POSIX_FADV_WILLNEED)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].name


def verify(root: Path, workers: int, progress: Callable[[int, int], None]) -> list[str]:
    """A line for every problem; none if all is as it was packed. Every byte of every file is read.

    Raises `ShardError`: there is no manifest to compare with, or that of a generation cannot be
    read.

    Args:
        progress: Called with the bytes of shards that are read, and those of all.
    """
    manifests = [read_manifest(root, number) for number in generations(root)]
    shards = manifests[-1].shards  # those of all others too
    problems = check_lengths(root, shards)
    names = {shard.name for shard in shards}
    problems += [
        f"{path} is not in the manifest; a reader of *.tar reads it too"
        for path in sorted(root.glob("*.tar"))
        if path.name not in names
    ]
    files = {name: sha256 for manifest in manifests for name, sha256 in manifest.files.items()}
    problems += filter(None, (damage(root / name, sha256) for name, sha256 in files.items()))

    def look(shard: Shard) -> str:
        path = root / shard.name
        return damage(path, shard.sha256) if path.exists() else ""

    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(workers) as pool:
        for shard, problem in zip(shards, pool.map(look, shards), strict=True):
            problems += filter(None, [problem])
            done += shard.bytes
            progress(done, total)
    return problems
