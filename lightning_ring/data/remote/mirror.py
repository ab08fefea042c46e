"""Manifest and index of a set at a URL, copied to the local disk: once for all processes of a host."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path, PurePosixPath

from lightning_ring.data.remote.cache import IN_USE, Cache
from lightning_ring.data.remote.store import ObjectStore
from lightning_ring.data.shards.index import DELETED
from lightning_ring.data.shards.manifest import (
    MANIFEST,
    REPORT,
    STAMPS,
    Manifest,
    file_sha256,
    index_folder,
    read_manifest,
)
from lightning_ring.errors import ShardError
from lightning_ring.host.file_lock import claim, release, share

log = logging.getLogger(__name__)

OF_PACKING = (REPORT, STAMPS, DELETED)  # files of a set that are not copied: what changes a set reads them
_WHOLE = "complete"  # written last
_TRIES = 3
_PATIENCE = 30.0  # seconds


class Mirror:
    """The folder ``path``, as if the set lay there without its shards. While this object lives it is not removed."""

    def __init__(self, store: ObjectStore, cache: Cache, generation: int | None = None) -> None:
        self._lock = -1
        manifest = _manifest(store, generation)
        self.path = cache.set(hashlib.sha256(manifest).hexdigest())
        try:
            while self._lock < 0:
                self._lock = _opened(self.path, manifest, store, cache)
        except OSError as error:
            raise cache.unwritable(error) from error

    def __del__(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)

    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def forget(self) -> None:
        """Have the next `Mirror` copy everything again: what is here is damaged."""
        if os.fstat(self._lock).st_nlink > 0:  # else another process has done so
            (self.path / IN_USE).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)


def _manifest(store: ObjectStore, generation: int | None) -> bytes:
    newest = store.submit(store.read_whole, MANIFEST).result()
    if generation is None or _generation(newest) == generation:
        return newest
    try:
        return store.submit(store.read_whole, f"{index_folder(generation)}/{MANIFEST}").result()
    except ShardError as error:
        raise ShardError(f"{store.url} has no generation {generation}: {error}") from None


def _generation(manifest: bytes) -> object:
    try:
        return json.loads(manifest)["generation"]
    except (ValueError, KeyError, TypeError):
        return None  # `read_manifest` tells what is wrong


def _opened(folder: Path, manifest: bytes, store: ObjectStore, cache: Cache) -> int:
    """A shared lock on ``folder``, which is copied if it is not there; -1 if it was removed meanwhile."""
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return -1
    shared = False
    try:
        began, said = time.monotonic(), False
        while not (shared := (folder / _WHOLE).exists() and share(lock)):
            if not _claimed(lock):  # another process copies: it ends, fails in time, or its lock goes with it
                time.sleep(0.05)
                if not said and time.monotonic() - began > _PATIENCE:
                    log.warning("lightning_ring: waiting for a process that copies the index of %s.", store.url)
                    said = True
            elif os.fstat(lock).st_nlink == 0:
                return -1
            elif not (folder / _WHOLE).exists():
                _copy(folder, manifest, store, cache)
        if os.fstat(lock).st_nlink == 0:
            shared = False
            return -1
        os.utime(folder)
        return lock
    finally:
        if not shared:
            release(lock)


def _claimed(lock: int) -> bool:
    try:
        claim(lock)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _copy(folder: Path, manifest: bytes, store: ObjectStore, cache: Cache) -> None:
    """Fill ``folder``, and compare the shards' lengths with the manifest."""
    (folder / MANIFEST).write_bytes(manifest)
    try:
        found = read_manifest(folder)
    except ShardError as error:
        raise ShardError(str(error).replace(str(folder), store.url)) from None
    _check_names(store, found)
    store.submit(_check_lengths, store, found).result()
    for name, sha256 in found.files.items():
        if Path(name).name not in OF_PACKING:
            _download(folder / name, name, sha256, store, cache)
    (folder / _WHOLE).touch()


def _check_names(store: ObjectStore, manifest: Manifest) -> None:
    """Names of the manifest become paths in the cache: it may come from anywhere."""
    checksums = [*manifest.files.values(), *(shard.sha256 for shard in manifest.shards)]
    wrong = [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    wrong += [text for text in checksums if not re.fullmatch("[0-9a-f]{64}", text)]
    if wrong:
        raise ShardError(
            f"{store.url}/{MANIFEST} names {wrong[0]!r}, expected paths inside the set and SHA-256 checksums: "
            "`lightning-ring pack` did not write it. Nothing of it was read."
        )


async def _check_lengths(store: ObjectStore, manifest: Manifest) -> None:
    async def problem(name: str, expected: int) -> str | None:
        try:
            size = await store.size(name)
        except ShardError as error:
            return str(error)
        if size in (None, expected):  # some servers do not say
            return None
        what = "cut short" if size < expected else "longer than packed"
        return f"{store.url}/{name} is {what}: it has {size} bytes, expected {expected}"

    problems = await asyncio.gather(*(problem(shard.name, shard.bytes) for shard in manifest.shards))
    if found := [line for line in problems if line]:
        more = [f"... and {len(found) - 10} more shards."] if len(found) > 10 else []
        raise ShardError("\n".join([*found[:10], *more, "Upload what is missing or damaged again."]))


def _download(path: Path, name: str, sha256: str, store: ObjectStore, cache: Cache) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    digest = ""
    for _ in range(_TRIES):  # bytes can change on their way
        store.submit(store.download, name, part, cache.make_room).result()
        if (digest := file_sha256(part)) == sha256:
            os.replace(part, path)
            return
    raise ShardError(
        f"{store.url}/{name} is not as it was packed: it has SHA-256 {digest}, expected {sha256}. Upload it again."
    )
