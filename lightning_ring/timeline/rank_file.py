"""A rank's trace: JSON lines, which `merge` makes into one JSON document for a viewer.

    {"otherData":{...}}          the run and this rank
    {event}
    {event}
    {"otherData":{...}}          the same and how it ended, once the file is closed

Lines are only appended, so that a process killed in the middle of a write (``kill -9``) leaves
whole lines and at most one torn one at the end. `read_events` drops that one.

While it is written the file is locked (`claim`): two jobs with one path do not write into one
trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_ring.host.file_lock import claim, release

_OTHER = b'{"otherData":'
_LONGEST_OTHER = 1 << 16  # bytes of a line of otherData


class TraceFile:
    """Appends events to a trace of at most ``max_bytes``, which replaces the file ``path``.

    ``other`` are facts about the whole trace, its ``otherData``. Raises `OSError` if the file
    cannot be written, or if another job is writing it.
    """

    def __init__(self, path: Path, other: dict[str, Any], *, max_bytes: int) -> None:
        self.path = path
        self.full = False  # events were dropped because the file had its largest size
        self.num_events = 0  # events written
        header = _other_line(other)
        self._room = max_bytes - 3 * len(header)  # the last line is longer than the first
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            claim(self._file)
        except OSError:
            self.leave()  # another job's
            raise
        try:
            os.ftruncate(self._file, 0)
            self._write(header)
        except OSError:
            self.discard()
            raise

    def append(self, events: Iterable[str]) -> None:
        """Write ``events``, each as JSON text in one line. They can be read from the file at once.

        Raises `OSError`: the disk is full, for instance. No further events may be appended then.
        """
        lines: list[bytes] = []
        for event in events:
            line = event.encode() + b"\n"
            self._room -= len(line)
            self.full = self.full or self._room < 0
            if self.full:
                break
            lines.append(line)
        self._write(b"".join(lines))
        self.num_events += len(lines)

    def close(self, other: dict[str, Any]) -> None:
        """Write the final ``otherData`` and close the file. Calling it twice is fine."""
        if self._file >= 0:
            try:
                self._write(_other_line(other))
            finally:
                self.leave()

    def leave(self) -> None:
        """Close the file without its final ``otherData``."""
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):
                release(file)

    def discard(self) -> None:
        """Remove the file. Nothing is written for it, so that a full disk is no obstacle, and
        nothing is raised.
        """
        with suppress(OSError):
            self.path.unlink()
        self.leave()

    def _write(self, data: bytes) -> None:
        written = os.write(self._file, data) if data else 0
        if written != len(data):
            raise OSError(f"{self.path}: {written} of {len(data)} bytes were written")


def _other_line(other: dict[str, Any]) -> bytes:
    return b"%b%b}\n" % (_OTHER, json.dumps(other, separators=(",", ":")).encode())


def read_other(path: Path) -> dict[str, Any]:
    """``otherData`` of a trace written by `TraceFile`; the final one if the file was closed.

    Raises `ValueError`: it is no such trace.
    """
    with open(path, "rb") as file:
        first = file.readline(_LONGEST_OTHER)
        file.seek(max(0, os.path.getsize(path) - _LONGEST_OTHER))
        last = file.read().splitlines(keepends=True)[-1:]
    closed = bool(last) and last[0].startswith(_OTHER) and last[0].endswith(b"\n")
    try:
        other = json.loads(last[0] if closed else first)["otherData"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no timeline of a rank: {error}") from None
    if not isinstance(other, dict):
        raise ValueError(f"{path} is no timeline of a rank: its otherData is no object")
    return other


def read_events(path: Path) -> Iterator[bytes]:
    """The events of a trace written by `TraceFile`, each as JSON text; a torn last one is left
    out.
    """
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and not line.startswith(_OTHER):
                yield line[:-1]
