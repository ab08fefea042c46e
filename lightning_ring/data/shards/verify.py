"""Checks that packed shards are unchanged: every byte of every file, of all generations, is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest, Shard, check_lengths, file_sha256, generations, read_manifest

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def verify(root: Path, workers: int, progress: Progress) -> list[str]:
    """A line for every problem; none if all is as it was packed.

    Lengths and checksums of all files; of a shard that differs, the images that do, with their offsets. Raises
    `ShardError`: there is no manifest to compare with, or that of a generation cannot be read.
    """
    manifests = [read_manifest(root, number) for number in generations(root)]
    newest_with = {shard.name: manifest for manifest in manifests for shard in manifest.shards}
    shards = list({shard.name: shard for manifest in manifests for shard in manifest.shards}.values())
    problems = check_lengths(root, shards)
    strangers = sorted(path for path in root.glob("*.tar") if path.name not in newest_with)
    problems += [f"{path} is not in the manifest; a reader of *.tar reads it too" for path in strangers]
    digest = _Digests()
    wrong = {name: line for manifest in manifests for name, line in _check_files(root, manifest, digest)}
    problems += wrong.values()

    def look(shard: Shard) -> list[str]:
        manifest = newest_with[shard.name]
        is_whole = not any(name.startswith(manifest.index) for name in wrong)  # else it would blame images that are
        index = partial(ShardIndex, root, manifest) if is_whole else None
        return check_shard(root / shard.name, shard, manifest, index)

    shards = [shard for shard in shards if (root / shard.name).exists()]
    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(workers) as pool:
        for shard, found in zip(shards, pool.map(look, shards), strict=True):
            problems += found
            done += shard.bytes
            progress(done, total)
    return problems


class _Digests:
    """SHA-256 of files, each read once: generations share files of their indices as hard links."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}

    def __call__(self, path: Path) -> str:
        status = os.stat(path)
        key = status.st_dev, status.st_ino
        if key not in self._known:
            self._known[key] = file_sha256(path)
        return self._known[key]


def _check_files(root: Path, manifest: Manifest, digest: Callable[[Path], str]) -> Iterator[tuple[str, str]]:
    """Names and problems of the files beside the shards."""
    for name, sha256 in manifest.files.items():
        try:
            found = digest(root / name)
        except OSError as error:
            yield name, f"{root / name} cannot be read: {error.strerror}"
            continue
        if found != sha256:
            yield name, f"{root / name} has SHA-256 {found}, expected {sha256}"


def check_shard(
    path: Path, shard: Shard, manifest: Manifest, index: Callable[[], ShardIndex] | None, shown: str | None = None
) -> list[str]:
    """Problems of the file ``path``, which errors call ``shown``; where ``index`` opens one, also of its images."""
    shown = shown or str(path)
    try:
        if (found := file_sha256(path)) == shard.sha256:
            return []
        images = () if index is None else _damaged_images(path, shown, manifest, shard, index())
        return [*images, f"{shown} has SHA-256 {found}, expected {shard.sha256}"]
    except OSError as error:  # a bad sector must not hide what is wrong elsewhere
        return [f"{shown} cannot be read: {error.strerror}"]


def _damaged_images(path: Path, shown: str, manifest: Manifest, shard: Shard, index: ShardIndex) -> Iterator[str]:
    first = sum(before.samples for before in manifest.shards[: manifest.shards.index(shard)])
    with open(path, "rb") as file:
        for i in range(first, first + shard.samples):
            _, offset, size, crc32 = index.place(i)
            file.seek(offset)
            data = file.read(size)
            if zlib.crc32(data) != crc32:
                found = "cut short" if len(data) < size else "its bytes are not those that were packed (CRC-32)"
                yield f"{shown}, offset {offset}, {size} bytes, image {i}: {found}"
            if len(data) < size:
                return  # the file has ended, and so would every image after this one
