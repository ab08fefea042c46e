"""Checks that packed shards are unchanged: every byte of every file is read."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy.typing as npt

from lightning_ring.data.shards.index import BLOCK, FOLDER, ShardIndex, key
from lightning_ring.data.shards.manifest import Manifest, Shard, check_lengths, file_sha256, read_manifest


class _Rows(NamedTuple):
    """The index of one shard; ``first`` is the number of its first image."""

    first: int
    labels: npt.NDArray[Any]
    blocks: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    crc32: npt.NDArray[Any]


def verify(root: Path, workers: int, progress: Callable[[int, int], None]) -> list[str]:
    """A line for every problem, with file and, for shards, offset; none if all is as it was packed.

    Lengths, checksums, and that index and tars agree on every image. ``progress`` gets bytes done and bytes in all.
    Raises `ShardError`: there is no manifest to compare with.
    """
    manifest = read_manifest(root)
    problems = check_lengths(root, manifest.shards)
    known = {shard.name for shard in manifest.shards}
    strangers = sorted(path for path in root.glob("*.tar") if path.name not in known)
    problems += [f"{path} is not in the manifest; a reader of *.tar reads it too" for path in strangers]
    files = _check_files(root, manifest)
    problems += files.values()
    index_is_whole = not any(name.startswith(FOLDER) for name in files)  # else it would blame shards that are whole
    rows = _rows(manifest, ShardIndex(root, manifest)) if index_is_whole else {}
    shards = [shard for shard in manifest.shards if (root / shard.name).exists()]
    done, total = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(workers) as pool:
        checks = [pool.submit(_check_shard, root / shard.name, shard, rows.get(shard.name)) for shard in shards]
        for shard, check in zip(shards, checks, strict=True):
            problems += check.result()
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


def _rows(manifest: Manifest, index: ShardIndex) -> dict[str, _Rows]:
    """The index, cut into shards, by the shard's name."""
    columns = [index.column(name) for name in ("labels", "blocks", "sizes", "crc32")]
    rows, first = {}, 0
    for shard in manifest.shards:
        rows[shard.name] = _Rows(first, *(column[first : first + shard.samples] for column in columns))
        first += shard.samples
    return rows


def _check_shard(path: Path, shard: Shard, rows: _Rows | None) -> list[str]:
    if rows is None:
        found = file_sha256(path)
        return [f"{path} has SHA-256 {found}, expected {shard.sha256}"] if found != shard.sha256 else []
    digest = hashlib.sha256()
    with open(path, "rb", buffering=2**20) as file:
        problems = list(_check_images(path, file, rows, digest))
        digest.update(file.read())
    if digest.hexdigest() != shard.sha256:
        where = "" if problems else "; all its images are whole, so the difference is between them"
        problems.append(f"{path} has SHA-256 {digest.hexdigest()}, expected {shard.sha256}{where}")
    return problems


def _check_images(path: Path, file: BinaryIO, rows: _Rows, digest: Any) -> Iterator[str]:
    """Walk one shard by its index, image after image, and feed all that is read to ``digest``."""
    ends = [*(int(block) - 1 for block in rows.blocks[1:]), None]
    for i, end in enumerate(ends):
        start, size = (int(rows.blocks[i]) - 1) * BLOCK, int(rows.sizes[i])
        chunk = file.read(end * BLOCK - start if end is not None else _sample_bytes(size))
        digest.update(chunk)
        name = key(rows.first + i)
        problem = _check_sample(chunk, name, size, int(rows.crc32[i]), int(rows.labels[i]))
        if problem:
            yield f"{path}, offset {start + BLOCK}, {size} bytes, image {name}: {problem}"
        if len(chunk) < _sample_bytes(size):
            return  # the file has ended, and so would every image after this one


def _sample_bytes(size: int) -> int:
    """Bytes of an image and its label in a tar: header, image, padding; header, label, padding."""
    return BLOCK + size + -size % BLOCK + 2 * BLOCK


def _check_sample(chunk: bytes, name: str, size: int, crc32: int, label: int) -> str:
    """The problem of one image and its label, whose tar members ``chunk`` should be; empty without one."""
    if len(chunk) != _sample_bytes(size):
        return f"cut short, {len(chunk)} of {_sample_bytes(size)} bytes (with its label) are there"
    try:
        image = tarfile.TarInfo.frombuf(chunk[:BLOCK], "utf-8", "replace")
        second = BLOCK + size + -size % BLOCK
        text = tarfile.TarInfo.frombuf(chunk[second : second + BLOCK], "utf-8", "replace")
    except tarfile.HeaderError as error:
        return f"its tar header is damaged ({error})"
    if image.name.partition(".")[0] != name or image.size != size:
        return f"the tar has {image.name} of {image.size} bytes there"
    if zlib.crc32(chunk[BLOCK : BLOCK + size]) != crc32:
        return "its bytes are not those that were packed (CRC-32)"
    found = chunk[second + BLOCK : second + BLOCK + text.size].decode("ascii", "replace")
    if text.name != f"{name}.cls" or found != str(label):
        return f"the tar has label {found!r} in {text.name}, the index has {label}"
    return ""
