"""A sparse local copy of a shard, which several processes fill and read at the same time."""

from __future__ import annotations

import os
from pathlib import Path
from time import time

BLOCK = 4096  # of most file systems: a smaller hole takes as much of the disk
_CLOCK = 254  # seconds that a byte counts, without 0 and 1
_BELIEVED = 3  # seconds
_TOUCH = 60.0  # seconds between notes that the copy is in use


class CachedShard:
    """The bytes of a shard at their own offsets, and behind them a note of one byte for each block of 4 KiB.

    0: the block is not there. 1: it is there. Else a process is fetching it since the second 2 + (time modulo 254); the
    others believe that for three seconds, for the process may have been killed.

    No lock is needed. A block is noted when its bytes are written, and writing it twice writes the same. After a crash
    of the machine the note may have reached the disk before the bytes; their CRC-32, which the reader compares, shows
    it. A copy that is removed while it is open reads as if nothing were there (`removed`).
    """

    def __init__(self, path: Path, size: int) -> None:
        self.descriptor = -1
        self._size = size
        self.num_blocks = -(-size // BLOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(self.descriptor, size + self.num_blocks)
        self._touched = 0.0
        self.touch()

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def touch(self) -> None:
        """Note on the disk, once a minute, that the copy is in use."""
        if (now := time()) - self._touched > _TOUCH:
            os.utime(self.descriptor)
            self._touched = now

    @property
    def removed(self) -> bool:
        return os.fstat(self.descriptor).st_nlink == 0

    def blocks(self, start: int, stop: int) -> range:
        """The blocks that hold bytes ``start`` to ``stop``."""
        return range(start // BLOCK, -(-stop // BLOCK))

    def bytes_of(self, blocks: range) -> tuple[int, int]:
        """Where ``blocks`` start and end."""
        return blocks.start * BLOCK, min(blocks.stop * BLOCK, self._size)

    def has(self, blocks: range) -> bool:
        """Whether all of ``blocks`` are there."""
        return self._notes(blocks) == b"\1" * len(blocks)

    def being_fetched(self, blocks: range) -> bool:
        """Whether a process is fetching some of ``blocks``."""
        now = int(time())
        return any(note > 1 and (now - note + 2) % _CLOCK < _BELIEVED for note in self._notes(blocks))

    def will_fetch(self, blocks: range) -> None:
        """Tell other processes that this one is fetching ``blocks``."""
        self._note(blocks, 2 + int(time()) % _CLOCK)

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, start)

    def write(self, blocks: range, data: bytes) -> None:
        """Keep ``data``, the bytes of ``blocks``."""
        write_at(self.descriptor, data, blocks.start * BLOCK)
        self._note(blocks, 1)

    def drop(self, blocks: range) -> None:
        """Forget ``blocks``: what was kept of them is damaged, or they could not be fetched."""
        self._note(blocks, 0)

    def _notes(self, blocks: range) -> bytes:
        return os.pread(self.descriptor, len(blocks), self._size + blocks.start)

    def _note(self, blocks: range, value: int) -> None:
        write_at(self.descriptor, bytes([value]) * len(blocks), self._size + blocks.start)


def write_at(file: int, data: bytes, offset: int) -> None:
    """All of ``data`` into the open ``file``."""
    view = memoryview(data)
    while view:  # a call writes 2 GiB at most, and less when a signal comes
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
