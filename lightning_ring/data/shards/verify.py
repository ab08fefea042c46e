"""Checks that packed shards are unchanged: every byte of every file, of all generations, is
read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import (
    Manifest,
    Shard,
    check_lengths,
    file_sha256,
    generations,
    read_manifest,
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def verify(root: Path, workers: int, progress: Progress) -> list[str]:
    """A line for every problem; none if all is as it was packed.

    Lengths and checksums of all files; of a shard that differs, the images that do, with their
    offsets. Raises `ShardError`: there is no manifest to compare with, or that of a generation
    cannot be read.
    """
    manifests = [read_manifest(root, number) for number in generations(root)]
    newest = manifests[-1]  # has the shards of all others
    problems = check_lengths(root, newest.shards)
    names = {shard.name for shard in newest.shards}
    strangers = sorted(path for path in root.glob("*.tar") if path.name not in names)
    problems += [
        f"{path} is not in the manifest; a reader of *.tar reads it too" for path in strangers
    ]
    wrong = dict(found for manifest in manifests for found in _check_files(root, manifest))
    problems += wrong.values()
    # else it would blame images that are
    is_whole = not any(name.startswith(newest.index) for name in wrong)

    def look(shard: Shard) -> list[str]:
        return _check_shard(
            root / shard.name,
            shard,
            newest,
            partial(ShardIndex, root, newest) if is_whole else None,
        )

    shards = [shard for shard in newest.shards if (root / shard.name).exists()]
    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(workers) as pool:
        for shard, found in zip(shards, pool.map(look, shards), strict=True):
            problems += found
            done += shard.bytes
            progress(done, total)
    return problems


def _check_files(root: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Names and problems of the files beside the shards."""
    for name, sha256 in manifest.files.items():
        try:
            found = file_sha256(root / name)
        except OSError as error:
            yield name, f"{root / name} cannot be read: {error.strerror}"
            continue
        if found != sha256:
            yield name, f"{root / name} has SHA-256 {found}, expected {sha256}"


def _check_shard(
    path: Path, shard: Shard, manifest: Manifest, index: Callable[[], ShardIndex] | None
) -> list[str]:
    """Problems of the file ``path``; if ``index`` opens one, also those of its images."""
    try:
        if (found := file_sha256(path)) == shard.sha256:
            return []
        images = () if index is None else _damaged_images(path, manifest, shard, index())
        return [*images, f"{path} has SHA-256 {found}, expected {shard.sha256}"]
    except OSError as error:  # a bad sector must not hide what is wrong elsewhere
        return [f"{path} cannot be read: {error.strerror}"]


def _damaged_images(
    path: Path, manifest: Manifest, shard: Shard, index: ShardIndex
) -> Iterator[str]:
    first = sum(before.samples for before in manifest.shards[: manifest.shards.index(shard)])
    with open(path, "rb") as file:
        for i in range(first, first + shard.samples):
            _, offset, size, crc32 = index.place(i)
            file.seek(offset)
            data = file.read(size)
            if zlib.crc32(data) != crc32:
                found = (
                    "cut short"
                    if len(data) < size
                    else "its bytes are not those that were packed (CRC-32)"
                )
                yield f"{path}, offset {offset}, {size} bytes, image {i}: {found}"
            if len(data) < size:
                return  # the file has ended, and so would every image after this one
