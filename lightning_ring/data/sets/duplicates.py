"""Images that are in a set twice, or in two splits: equal bytes, or pictures that look alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sets.near import MAX_DISTANCE, near_pairs
from lightning_ring.data.shards.files import ShardFiles
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import ConfigurationError

_AT_ONCE = 256  # images that wait for a thread

Progress = Callable[[int, int], None]  # images looked at, images in all


class Image(NamedTuple):
    split: str
    name: str
    class_name: str


@dataclass(frozen=True)
class Duplicate:
    """``image`` is like ``of``, which comes before it. ``distance``: bits of the perceptual hash; None: equal bytes."""

    image: Image
    of: Image
    distance: int | None

    @property
    def kind(self) -> str:
        """A leak is between two splits."""
        if self.image.split != self.of.split:
            return "leak"
        return "duplicate" if self.distance is None else "near duplicate"


class _Images:
    """Images of all sets, numbered through."""

    def __init__(self, roots: Sequence[Path], split_by: str | None) -> None:
        self.manifests = [read_manifest(root) for root in roots]
        self.indices = [ShardIndex(root, manifest) for root, manifest in zip(roots, self.manifests, strict=True)]
        pairs = zip(roots, self.manifests, strict=True)
        self.files = [ShardFiles(root, manifest.shards) for root, manifest in pairs]
        self._ends = np.cumsum([len(index) for index in self.indices])
        self.splits = np.concatenate([self._splits(i, root, split_by) for i, root in enumerate(roots)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _splits(self, number: int, root: Path, split_by: str | None) -> npt.NDArray[Any]:
        index = self.indices[number]
        if split_by is None:
            return np.full(len(index), str(root), object)
        column = index.metadata.get(split_by)
        if column is None or column.kind != "text":
            there = ", ".join(name for name, column in index.metadata.items() if column.kind == "text") or "none"
            raise ConfigurationError(f"{root} has no column of texts {split_by!r}; it has {there}.")
        return np.array(column.texts, object)[column.values]

    def place(self, i: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, i, side="right"))
        return number, i - (int(self._ends[number - 1]) if number else 0)

    def image(self, i: int) -> Image:
        number, row = self.place(i)
        index = self.indices[number]
        return Image(self.splits[i], index.name(row), self.manifests[number].classes[index.labels[row]])

    def read(self, i: int) -> bytes:
        number, row = self.place(i)
        return self.files[number].read_whole(self.indices[number].place(row))

    def checksums(self) -> npt.NDArray[np.uint64]:
        """Length and CRC-32 of every image, in one number."""
        columns = [index.column("places")[:, 1:].astype(np.uint64) for index in self.indices]
        return np.concatenate([column[:, 0] << np.uint64(32) | column[:, 1] for column in columns])


def find_duplicates(
    roots: Sequence[Path],
    distance: int | None = 4,
    split_by: str | None = None,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[Duplicate]:
    """Images of the sets ``roots`` that are there twice, each with the nearest one before it.

    An image that is like others of its split and of another one is in the list twice: as a duplicate, and as a leak.

    Args:
        distance: Bits in which the 64-bit perceptual hashes (imagehash's ``phash``) of two images may differ, at most.
            None: only images of equal bytes are found, without reading others.
        split_by: A column of texts that names the split of each image. Left out, each set is a split.
        workers: Threads that decode.

    Raises:
        ConfigurationError: ``distance`` is too large, or the column is not there.
        ShardError: A set is damaged.
    """
    if distance is not None and not 0 <= distance <= MAX_DISTANCE:
        raise ConfigurationError(f"--distance {distance}: expected 0 to {MAX_DISTANCE} bits.")
    images = _Images(roots, split_by)
    nearest: dict[tuple[int, bool], tuple[int, int]] = {}  # by image and whether the split is another: distance, other
    for i, j in _equal(images):
        _take(nearest, images, i, j, -1)
    if distance is not None:
        hashes, read = _hashes(images, workers, progress)
        for i, j, differ in _alike(hashes, read, images.splits, distance):
            _take(nearest, images, i, j, differ)
    return [
        Duplicate(images.image(j), images.image(i), None if differ < 0 else differ)
        for (j, _), (differ, i) in sorted(nearest.items())
    ]


def _take(nearest: dict[tuple[int, bool], tuple[int, int]], images: _Images, i: int, j: int, differ: int) -> None:
    place = j, bool(images.splits[i] != images.splits[j])
    nearest[place] = min(nearest.get(place, (differ, i)), (differ, i))


def _equal(images: _Images) -> list[tuple[int, int]]:
    """Pairs of equal bytes, each image with all that come first in their split."""
    checksums = images.checksums()
    order = np.argsort(checksums, kind="stable")
    starts = np.flatnonzero(np.concatenate([[True], np.diff(checksums[order]) != 0]))
    ends = np.append(starts[1:], len(order))
    pairs = []
    repeated = ends - starts > 1
    for start, end in zip(starts[repeated].tolist(), ends[repeated].tolist(), strict=True):
        first: dict[tuple[bytes, str], int] = {}
        for j in np.sort(order[start:end]).tolist():
            data, split = images.read(j), images.splits[j]
            pairs += [(i, j) for (other, _), i in first.items() if other == data]
            first.setdefault((data, split), j)
    return pairs


def _alike(
    hashes: npt.NDArray[np.uint64], read: npt.NDArray[np.int64], splits: npt.NDArray[Any], distance: int
) -> Iterator[tuple[int, int, int]]:
    """Each image ``j`` with the first image of each hash and split that it is near to, if that comes before it.

    Thousands of images of one hash (all black) are so compared with the first of them, not with each other.
    """
    unique, inverse = np.unique(hashes, return_inverse=True)
    members: list[list[int]] = [[] for _ in unique]
    firsts: list[dict[str, int]] = [{} for _ in unique]
    for j, number in zip(read.tolist(), inverse.tolist(), strict=True):
        members[number].append(j)
        firsts[number].setdefault(splits[j], j)
    same = np.arange(len(unique))
    for some, others, bits in chain([(same, same, np.zeros_like(same))], near_pairs(unique, distance)):
        for a, b, differ in zip(some.tolist(), others.tolist(), bits.tolist(), strict=True):
            for first, of in ((a, b), (b, a)) if a != b else ((a, a),):
                yield from ((i, j, differ) for j in members[of] for i in firsts[first].values() if i < j)


def _hashes(images: _Images, workers: int, progress: Progress) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Perceptual hashes of all images that can be decoded, and their numbers."""
    import imagehash
    from PIL import Image as Pillow

    Pillow.init()  # once, here: threads that load Pillow's plugins at the same time disturb each other

    def look(i: int) -> int | None:
        try:
            with Pillow.open(BytesIO(images.read(i))) as picture:
                return int(str(imagehash.phash(picture)), 16)
        except (OSError, ValueError, SyntaxError):  # packing has decoded it: `pack --verify` says what is damaged
            return None

    found: list[int | None] = []
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(images), _AT_ONCE):
            found += pool.map(look, range(start, min(start + _AT_ONCE, len(images))))
            progress(len(found), len(images))
    read = np.array([i for i, value in enumerate(found) if value is not None], np.int64)
    return np.array([value for value in found if value is not None], np.uint64), read
