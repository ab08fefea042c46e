"""Open shards of one process: read by any of its threads, and by children that it forks."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.data.shards.index import ByteRange
from lightning_ring.data.shards.manifest import Shard
from lightning_ring.errors import ShardError


class _OpenFile:
    """A descriptor that closes when the last thread that uses it lets go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):  # Linux; without it each small read would fetch 128 KiB
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class ShardFiles:
    """Reads bytes of shards. Files open when they are first needed and share no position, so threads need no lock.

    At most a quarter of the files that the process may have open are kept; ``max_open`` says it otherwise.
    """

    def __init__(self, root: Path, shards: Sequence[Shard], max_open: int | None = None) -> None:
        self._root = root
        self._shards = shards
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = limit // 4 if limit != resource.RLIM_INFINITY else len(shards)
        self._max_open = max(1, few if max_open is None else max_open)
        self._files: dict[int, _OpenFile] = {}

    def _file(self, shard: int) -> _OpenFile:
        file = self._files.get(shard)
        if file is None:
            try:
                file = _OpenFile(self._root / self._shards[shard].name)
            except FileNotFoundError:
                raise ShardError(f"{self._root / self._shards[shard].name} is gone since it was opened.") from None
            # Not an OrderedDict behind a lock: a lock that a thread holds during a fork stays held in the child.
            for oldest in list(self._files)[: max(0, len(self._files) - self._max_open + 1)]:
                self._files.pop(oldest, None)
            self._files[shard] = file
        return file

    def read(self, place: ByteRange) -> bytes:
        """The bytes at ``place``, in one system call, without the GIL.

        Raises:
            ShardError: The file is gone, ends before, or the disk fails.
        """
        file = self._file(place.shard)  # held, or another thread could close it meanwhile
        try:
            data = os.pread(file.descriptor, place.size, place.offset)
        except OSError as error:
            raise ShardError(
                f"{self.path(place.shard)} cannot be read at offset {place.offset}, {place.size} bytes: "
                f"{error.strerror}. Look after the disk or the network file system, then start the job again."
            ) from error
        if len(data) != place.size:
            shard = self._shards[place.shard]
            raise ShardError(
                f"{self._root / shard.name} is cut short: at offset {place.offset} it has {len(data)} bytes, expected "
                f"{place.size}. Restore the file ({shard.bytes} bytes, SHA-256 {shard.sha256})."
            )
        return data

    def will_need(self, places: Sequence[ByteRange]) -> None:
        """Tell the kernel to start reading ``places``, all at once; returns before it has."""
        if hasattr(os, "posix_fadvise"):
            for shard, offset, size in places:
                file = self._file(shard)
                os.posix_fadvise(file.descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].name
