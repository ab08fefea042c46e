"""A rank's trace: a file that is valid JSON at every moment, also after ``kill -9``.

The file ends with its closing brackets from the start, and between the last event and them there are spaces, which
JSON ignores. Events are written over these spaces:

    {"displayTimeUnit":"ms","otherData":{...},"traceEvents":[
    {first event}
    ,{event}
    ,{event}
                           (spaces)
    ]}

SIGKILL ends a write(2) where the kernel looks for it, which is between two pages of the page cache. So one write
touches one page: an event that does not fit into the rest of a page goes to the next one, and the rest stays spaces.
When there are no spaces left, a copy of twice the size takes the file's name (rename is atomic). A loss of power may
damage the file, since nothing waits for the disk.

While it is written the file is locked (`claim`), and each copy before it takes the name: two jobs that were given one
path do not write into one trace.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_ring.host.file_lock import TAKEN, claim, is_claimed, release

PAGE = 4096  # the page size of every system is a multiple of it
TAIL = b"\n]}\n"
_FIRST_SIZE = 64 * PAGE
_PIECE = 1 << 20


class TraceFile:
    """Appends events to a trace of at most ``max_bytes``.

    Args:
        path: Replaced if it exists.
        other: What is known of the whole trace, JSON's ``otherData``.
        first: The first event, as JSON text.
        max_bytes: Largest size of the file, spaces included.

    Raises:
        OSError: The file cannot be written, or another job is writing it.

    Attributes:
        full: Events were dropped because the file had its largest size.
        num_events: Events written.
    """

    def __init__(
        self, path: Path, other: dict[str, Any], first: str, *, max_bytes: int, first_size: int = _FIRST_SIZE
    ) -> None:
        self.path = path
        self.full = False
        self.num_events = 1
        self._part = path.with_name(path.name + ".part")
        self._max_size = max_bytes
        start = _header(other) + first.encode() + b"\n"
        self._header_size = len(_header(other))
        self._end = self._at = len(start)  # of what is written; where the next event goes, perhaps on the next page
        self._size = max(first_size, 2 * self._at)
        self._file = self._replace(iter([start]), self._size, first=True)

    def append(self, events: Iterable[str]) -> None:
        """Write ``events``, each as JSON text of less than 4 KB in one line. They can be read from the file at once.

        Raises:
            OSError: The disk is full, for instance. What was written before stays valid.
        """
        batch = bytearray()
        for event in events:
            line = b",%b\n" % event.encode()
            assert len(line) <= PAGE, f"an event of {len(line)} bytes"
            in_page = self._at % PAGE + len(batch)
            if in_page + len(line) > PAGE:
                self._write(batch)
                batch.clear()
                self._at += -self._at % PAGE
            batch += line
        self._write(batch)

    def close(self, other: dict[str, Any]) -> None:
        """Give the file its final ``otherData`` and take the spaces away. Calling it twice is fine."""
        if self._file < 0:
            return
        before, self._file = self._file, -1
        try:
            release(self._replace(self._used(before, _header(other)), size=0))
        finally:
            release(before)

    def leave(self) -> None:
        """Close the file as it is, valid and without its final ``otherData``."""
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):
                release(file)

    def discard(self) -> None:
        """Remove the file. Nothing is written for it, so that a full disk is no obstacle, and nothing is raised."""
        with suppress(OSError):
            self.path.unlink()
        self.leave()

    def _write(self, batch: bytearray) -> None:
        if not batch or self.full:
            return
        if self._at + len(batch) > self._size - len(TAIL):
            self._grow()
            if self.full:
                return
        written = os.pwrite(self._file, batch, self._at)
        if written != len(batch):
            os.pwrite(self._file, b" " * len(batch), self._at)
            raise OSError(f"{self.path}: {written} of {len(batch)} bytes were written")
        self._end = self._at = self._at + written
        self.num_events += batch.count(b"\n")

    def _grow(self) -> None:
        size = min(2 * self._size, self._max_size)
        if size <= self._size or size - len(TAIL) < self._at + PAGE:
            self.full = True
            return
        before = self._file
        self._file = self._replace(self._used(before, None), size)
        self._size = size
        release(before)

    def _used(self, file: int, header: bytes | None) -> Iterator[bytes]:
        """What the file holds up to the spaces, with another header if one is given."""
        at = 0
        if header is not None:
            yield header
            at = self._header_size
        while at < self._end:
            piece = os.pread(file, min(_PIECE, self._end - at), at)
            if not piece:
                raise OSError(f"{self.path} has become shorter than what was written to it")
            yield piece
            at += len(piece)

    def _replace(self, content: Iterator[bytes], size: int, *, first: bool = False) -> int:
        """Write ``content``, spaces up to ``size`` and the tail, give it the file's name, and return it opened."""
        file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            claim(file)
        except OSError:
            release(file)  # what another job is about to give the name
            raise
        try:
            if first and is_claimed(self.path):
                raise OSError(errno.EBUSY, TAKEN)
            os.ftruncate(file, 0)
            with open(file, "wb", closefd=False) as out:
                for piece in content:
                    out.write(piece)
                spaces = max(0, size - len(TAIL) - out.tell())
                while spaces:
                    spaces -= out.write(b" " * min(spaces, _PIECE))
                out.write(TAIL)
            os.replace(self._part, self.path)
        except BaseException:
            release(file)
            self._part.unlink(missing_ok=True)
            raise
        return file


def _header(other: dict[str, Any]) -> bytes:
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other, separators=(",", ":"))},"traceEvents":[\n'.encode()


def read_other(path: Path) -> dict[str, Any]:
    """``otherData`` of a trace written by `TraceFile`.

    Raises:
        ValueError: It is no such trace.
    """
    with open(path, "rb") as file:
        line = file.readline(1 << 20)
    try:
        other = json.loads(line + b"]}")["otherData"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no timeline of a rank: {error}") from None
    if not isinstance(other, dict):
        raise ValueError(f"{path} is no timeline of a rank: its otherData is no object")
    return other


def ends_whole(path: Path) -> bool:
    """Whether the file has its end. `TraceFile` gives it one at every moment, a copy that broke off has none."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - len(TAIL)))
        return file.read() == TAIL


def read_events(path: Path) -> Iterator[bytes]:
    """The events of a trace written by `TraceFile`, each as JSON text."""
    with open(path, "rb") as file:
        file.readline()
        for line in file:
            event = line.strip(b" ,\n")
            if event and event != b"]}":
                yield event
