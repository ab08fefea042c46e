"""Checks that packed shards are unchanged: every byte of every file is read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest, Shard, check_lengths, file_sha256, generations, read_manifest


def verify(root: Path, workers: int, progress: Callable[[int, int], None]) -> list[str]:
    """A line for every problem; none if all is as it was packed.

    Lengths and checksums of all files; of a shard that differs, the images that do, with their offsets. ``progress``
    gets bytes done and bytes in all. Raises `ShardError`: there is no manifest to compare with.
    """
    manifest = read_manifest(root)
    problems = check_lengths(root, manifest.shards)
    known = {shard.name for number in generations(root) for shard in read_manifest(root, number).shards}
    strangers = sorted(path for path in root.glob("*.tar") if path.name not in known)
    problems += [f"{path} is not in the manifest; a reader of *.tar reads it too" for path in strangers]
    files = _check_files(root, manifest)
    problems += files.values()
    index_is_whole = not any(
        name.startswith(manifest.index) for name in files
    )  # else it would blame images that are whole
    index = ShardIndex(root, manifest) if index_is_whole else None
    shards = [shard for shard in manifest.shards if (root / shard.name).exists()]
    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(lambda shard: file_sha256(root / shard.name), shards)
        for shard, found in zip(shards, digests, strict=True):
            if found != shard.sha256:
                problems += _damaged_images(root / shard.name, manifest, shard, index) if index is not None else ()
                problems.append(f"{root / shard.name} has SHA-256 {found}, expected {shard.sha256}")
            done += shard.bytes
            progress(done, total)
    return problems


def _check_files(root: Path, manifest: Manifest) -> dict[str, str]:
    """Problems of the files beside the shards, by name."""
    problems = {}
    for name, sha256 in manifest.files.items():
        try:
            found = file_sha256(root / name)
        except OSError as error:
            problems[name] = f"{root / name} cannot be read: {error.strerror}"
            continue
        if found != sha256:
            problems[name] = f"{root / name} has SHA-256 {found}, expected {sha256}"
    return problems


def _damaged_images(path: Path, manifest: Manifest, shard: Shard, index: ShardIndex) -> Iterator[str]:
    first = sum(before.samples for before in manifest.shards[: manifest.shards.index(shard)])
    with open(path, "rb") as file:
        for i in range(first, first + shard.samples):
            _, offset, size, crc32 = index.place(i)
            file.seek(offset)
            data = file.read(size)
            if zlib.crc32(data) != crc32:
                found = "cut short" if len(data) < size else "its bytes are not those that were packed (CRC-32)"
                yield f"{path}, offset {offset}, {size} bytes, image {i}: {found}"
            if len(data) < size:
                return  # the file has ended, and so would every image after this one
