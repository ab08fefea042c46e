"""The folder on the local disk that keeps what was read from object stores, up to a number of bytes.

shards/SHA-256      sparse copies of shards (`CachedShard`), by the checksum of the whole shard
sets/SHA-256/       manifest and index of a set, by the checksum of the manifest
lock                held by the process that removes

Names follow the content. A set that has changed, or the same set at another URL, shares the shards that are the same.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.errors import ConfigurationError, StoreError
from lightning_ring.host.file_lock import claim, release

log = logging.getLogger(__name__)

IN_USE = "in-use"  # in the folder of a set: its readers hold a shared lock on it
_CHECK_EVERY = 1 / 256  # of the limit: written by one process before it looks at the whole folder
_FULL = 7 / 8  # of the limit: 32 processes that look at different times stay below it
_AFTER = 3 / 4  # of the limit: what is left when something was removed


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    bytes: int
    used: float


class Cache:
    """A folder that all processes of a host, of several jobs too, may fill and read at the same time.

    Removing takes no agreement: a process that has the file open sees that it is gone, and asks the store again.

    Args:
        folder: On a local disk. It is made if it is not there.
        limit: Bytes that the folder takes at most.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._unchecked = limit  # the first write looks
        self._warned = False
        try:
            (folder / "shards").mkdir(parents=True, exist_ok=True)
            (folder / "sets").mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the cache {folder} cannot be made: {error.strerror}. Remote(cache=...) takes another folder."
            ) from error

    def shard(self, sha256: str) -> Path:
        return self.folder / "shards" / sha256

    def set(self, name: str) -> Path:
        return self.folder / "sets" / name

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a set of shards stays, once it is here, if nothing else is."""
        return num_bytes <= self._limit * _AFTER

    def make_room(self, num_bytes: int) -> None:
        """Before ``num_bytes`` are written: remove what was not used for the longest time, if the limit is near."""
        self._unchecked += num_bytes
        if self._unchecked < self._limit * _CHECK_EVERY:
            return
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            claim(lock)
        except OSError:
            return  # another process looks
        else:
            self._unchecked = 0
            self._remove(num_bytes)
        finally:
            release(lock)

    def empty(self) -> None:
        """Remove all shards: the disk is full."""
        for path in (self.folder / "shards").iterdir():
            remove_shard(path)

    def unwritable(self, error: OSError) -> StoreError:
        return StoreError(
            f"the cache {self.folder} cannot be written: {error.strerror}. Free the disk, or put the cache on another "
            "one by Remote(cache=...)."
        )

    def _remove(self, num_bytes: int) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        total = sum(entry.bytes for entry in entries) + num_bytes
        if total <= self._limit * _FULL:
            return
        for entry in entries:
            if total <= self._limit * _AFTER:
                return
            if entry.path.is_dir():
                total -= entry.bytes * _remove_set(entry.path)
            else:
                remove_shard(entry.path)
                total -= entry.bytes
        if total > self._limit and not self._warned:
            self._warned = True
            log.warning(
                "lightning_ring: the cache %s takes %.1f MiB, above its limit of %.1f: the indices of sets that are "
                "open take so much. Remote(cache_gb=...) sets the limit.",
                *(self.folder, total / 2**20, self._limit / 2**20),
            )

    def _entries(self) -> Iterator[_Entry]:
        for path in (*(self.folder / "shards").iterdir(), *(self.folder / "sets").iterdir()):
            with suppress(FileNotFoundError):  # another process removes it
                files = [path, *path.rglob("*")] if path.is_dir() else [path]
                yield _Entry(path, sum(file.stat().st_blocks * 512 for file in files), path.stat().st_mtime)


def remove_shard(path: Path) -> None:
    """Remove a `CachedShard`; its bytes are freed even while processes have it open."""
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR)
        try:
            os.unlink(path)
            os.ftruncate(file, 0)
        finally:
            os.close(file)


def _remove_set(path: Path) -> bool:
    """Remove the folder of a set, unless a process reads it or is making it."""
    try:
        lock = os.open(path / IN_USE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return False
    try:
        claim(lock)
    except OSError:
        return False
    else:
        os.unlink(path / IN_USE)  # processes that wait for the lock see that it is gone
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        release(lock)
