"""Open shard files: their number is bounded in the process, however many data sets it reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from lightning_ring.data.shards.index import ByteRange
from lightning_ring.data.shards.manifest import Shard
from lightning_ring.errors import ShardLostError
from lightning_ring.host.open_files import most_open_files

_LOOK_AFTER = "Look after the disk or the network file system, then start the job again."
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # Windows


class _OpenFile:
    """A descriptor that closes when the last thread that uses it lets go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, _FLAGS)
        # Windows: reading moves a position
        self._lock = None if hasattr(os, "pread") else threading.Lock()
        if hasattr(os, "posix_fadvise"):  # Linux; without it each small read would fetch 128 KiB
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, size: int, offset: int) -> bytes:
        if self._lock is None:
            return os.pread(self.descriptor, size, offset)
        with self._lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.read(self.descriptor, size)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


# by data set and shard, of this process, the oldest first
_open: dict[tuple[int, int], _OpenFile] = {}
_numbers = count()


class ShardFiles:
    """Reads bytes of shards. Files open when they are first needed and share no position, so
    threads need no lock.

    All data sets of a process together keep ``max_open`` files open, by default a quarter of the
    process's limit.
    """

    def __init__(self, root: Path, shards: Sequence[Shard], max_open: int | None = None) -> None:
        self._number = next(_numbers)
        self._root = root
        self._shards = shards
        self._max_open = max(1, most_open_files() // 4 if max_open is None else max_open)

    def __del__(self) -> None:
        for key in [key for key in list(_open) if key[0] == self._number]:
            _open.pop(key, None)

    def _file(self, shard: int) -> _OpenFile:
        key = self._number, shard
        file = _open.get(key)
        if file is None:
            try:
                file = _OpenFile(self.path(shard))
            except FileNotFoundError:
                raise ShardLostError(
                    f"{self.path(shard)} is gone since the set was opened. Restore the file, then "
                    "start the job again."
                ) from None
            except OSError as error:
                raise ShardLostError(
                    f"{self.path(shard)} cannot be opened: {error.strerror}. {_LOOK_AFTER}"
                ) from error
            # Not an OrderedDict behind a lock: a lock that a thread holds during a fork stays held
            # in the child.
            for oldest in list(_open)[: max(0, len(_open) - self._max_open + 1)]:
                _open.pop(oldest, None)
            _open[key] = file
        return file

    def read(self, place: ByteRange) -> bytes:
        """The bytes at ``place``, in one system call, without the GIL. Their CRC-32 is the caller's
        to compare.

        Raises `ShardLostError`: the file is gone, ends before, or the disk fails.
        """
        file = self._file(place.shard)  # held, or another thread could close it meanwhile
        try:
            data = file.read(place.size, place.offset)
        except OSError as error:
            raise ShardLostError(
                f"{self.path(place.shard)} cannot be read at offset {place.offset}, {place.size} "
                f"bytes: {error.strerror}. {_LOOK_AFTER}"
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
        if hasattr(os, "posix_fadvise"):
            for place in places:
                file = self._file(place.shard)
                os.posix_fadvise(file.descriptor, place.offset, place.size, os.POSIX_FADV_WILLNEED)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].name
