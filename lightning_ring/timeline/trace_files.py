"""The ranks' trace files: JSON lines, which `merge` makes into one JSON document for a viewer.

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
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_lock import TAKEN, claim, is_claimed, release
from lightning_ring.host.whole_file import whole_file
from lightning_ring.timeline.settings import is_timeline

_OTHER = b'{"otherData":'
# bytes of a line of otherData
_LONGEST_OTHER = 1 << 16
_MOST_RANKS = 1 << 20
MAX_BYTES = 64 << 20  # of a rank's file


class TraceFile:
    """Appends events to a trace of at most ``max_bytes``, which replaces the file ``path``.

    ``other`` are facts about the whole trace, its ``otherData``. Raises `OSError` if the file
    cannot be written, or if another job is writing it.
    """

    def __init__(self, path: Path, other: dict[str, Any], *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        # events were dropped because the file had its largest size
        self.full = False
        header = _other_line(other)
        # the last line is longer than the first
        self._room = max_bytes - 3 * len(header)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o644)
        try:
            claim(self._file)
        except OSError:
            # another job's
            self.leave()
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
        lines = []
        for event in events:
            line = event.encode() + b"\n"
            self._room -= len(line)
            self.full |= self._room < 0
            if self.full:
                break
            lines.append(line)
        self._write(b"".join(lines))

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
    return b"%b%b}\n" % (_OTHER, compact(other).encode())


def compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_other(path: Path) -> dict[str, Any]:
    """``otherData`` of a trace written by `TraceFile`; the final one if the file was closed.

    Raises `ValueError`: it is no such trace.
    """
    with open(path, "rb") as file:
        line = file.readline(_LONGEST_OTHER)
        file.seek(max(0, os.path.getsize(path) - _LONGEST_OTHER))
        *_, last = file.read().splitlines(keepends=True) or [b""]
    if last.startswith(_OTHER) and last.endswith(b"\n"):
        line = last
    try:
        other: dict[str, Any] = json.loads(line)["otherData"]
        return dict(other)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no timeline of a rank: {error}") from None


def read_events(path: Path) -> Iterator[bytes]:
    """The events of a trace written by `TraceFile`, each as JSON text; a torn last one is left
    out.
    """
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and not line.startswith(_OTHER):
                yield line[:-1]


# -- names


def rank_file(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}.jsonl")


def rank_files(path: Path) -> dict[int, Path]:
    """The ranks' files that are there, by rank."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank(\d+)\.jsonl")
    files = path.absolute().parent.glob("*.jsonl")
    found = [(int(match[1]), file) for file in files if (match := pattern.fullmatch(file.name))]
    return dict(sorted(found))


def remove_earlier(path: Path) -> None:
    """Remove what an earlier run left under this name (``trace-2.json`` too): it would pass for
    part of this one.

    Raises `ConfigurationError`: that run goes on.
    """
    pattern = re.compile(re.escape(path.stem) + r"(-\d+)?(\.rank\d+\.jsonl|\.json)(\.part)?")
    found = path.absolute().parent.glob("*.json*")
    mine = [file for file in sorted(found) if pattern.fullmatch(file.name) and is_timeline(file)]
    for file in mine:
        if is_claimed(file):
            raise ConfigurationError(
                f"The timeline {path} is in use: {file.name}, {TAKEN}. Give each job a path of its "
                "own, or wait until that one has ended."
            )
    for file in mine:
        file.unlink(missing_ok=True)


# -- merging


def gather_files(path: Path, run: str, comm: Communicator, number: int) -> list[str]:
    """Bring the files of ``run`` that rank 0 cannot see to rank 0's folder. Collective; all ranks
    have closed theirs.

    ``number`` is that of this rank's file. A file that cannot be read or written is left out. Every
    rank gets the list of problems.
    """
    names = comm.all_gather_object(rank_file(path, number).name, name="timeline: names")
    seen = [_is_of(path.with_name(name), run) for name in names]
    problems = []
    for rank, of_run in enumerate(comm.broadcast_object(seen, name="timeline: seen files")):
        if not of_run and (problem := _send(path.with_name(names[rank]), rank, comm)):
            problems.append(f"rank {rank}: {problem}")
    return problems


def _is_of(file: Path, run: str) -> bool:
    try:
        return read_other(file).get("run") == run
    except (OSError, ValueError):
        return False


def _send(file: Path, rank: int, comm: Communicator) -> str:
    """From ``rank`` to rank 0; every rank takes part. Returns what went wrong, or ""."""
    content, problem = b"", ""
    try:
        content = file.read_bytes() if comm.rank == rank else b""
    except OSError as error:
        problem = str(error)
    content, problem = comm.broadcast_object((content, problem), src=rank, name="timeline: a file")
    try:
        if comm.rank == 0 and not problem:
            file.write_bytes(content)
    except OSError as error:
        problem = str(error)
    received: str = comm.broadcast_object(problem, name="timeline: problem")
    return received


@dataclass(slots=True)
class Merged:
    """The contents of a merged trace."""

    path: Path
    # of the run, with those that have joined
    world_size: int
    # ``otherData`` of each rank with a file
    others: dict[int, dict[str, Any]]
    # files that were not taken, and why
    left_out: list[str]
    num_events: int = 0

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.others]

    @property
    def unfinished(self) -> list[int]:
        """Their files were not closed: the run was killed or still goes on, or a copy was cut
        short.
        """
        return [rank for rank, other in self.others.items() if "ended" not in other]


def merge(path: Path, output: Path | None = None) -> Merged:
    """Write the ranks' files of the timeline ``path`` (``trace.json``) to ``output``, by default to
    ``path`` itself.

    Only files of the newest run are taken. Memory stays small, whatever the size. Raises
    `ConfigurationError` without a file of a rank; `OSError` if writing fails.
    """
    files = rank_files(path)
    others, left_out = {}, []
    for rank, file in files.items():
        try:
            others[rank] = _checked(read_other(file))
        # of damaged ``otherData``: anything
        except Exception as error:
            left_out.append(f"{file.name}: {error!r:.200}")
    if not others:
        nothing = f"there is no {path.stem}.rank0.jsonl or the like in {path.absolute().parent}"
        raise ConfigurationError(
            f"No timeline of a rank can be merged into {path.name}: "
            f"{'; '.join(left_out) or nothing}."
        )
    newest = max(others.values(), key=lambda other: str(other["began"]))
    of_run = {rank: other for rank, other in others.items() if other["run"] == newest["run"]}
    left_out += [f"{files[rank].name}: of an earlier run" for rank in others.keys() - of_run.keys()]
    world_size = len({*range(newest["world_size"]), *of_run})
    merged = Merged(output or path, world_size, of_run, left_out)
    _write(merged, newest, files)
    return merged


def _checked(other: dict[str, Any]) -> dict[str, Any]:
    """Raises an error of some kind unless this is what a `Session` writes."""
    world_size, rank = other["world_size"], other["rank"]
    if type(world_size) is not int or not 0 < world_size <= _MOST_RANKS:
        raise ValueError(f"its world_size is {world_size!r:.80}")
    numbers = [rank["zero"], *(rank["clock"][name] for name in ("at", "offset", "error"))]
    if "shared" not in rank["clock"] or not all(map(math.isfinite, numbers)):
        raise ValueError("its clock is damaged")
    if not {"generator", "run", "began"} <= other.keys():
        raise ValueError("it does not name its run")
    return other


def _write(merged: Merged, newest: dict[str, Any], files: dict[int, Path]) -> None:
    about = {name: newest[name] for name in ("generator", "run", "began")} | {
        "world_size": merged.world_size,
        "missing_ranks": merged.missing,
        "unfinished_ranks": merged.unfinished,
        "ranks": {str(rank): other["rank"] for rank, other in merged.others.items()},
    }
    head = b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n'
    with whole_file(merged.path) as out:
        out.write(head % compact(about).encode())
        for rank in merged.others:
            for event in read_events(files[rank]):
                out.write(b",\n%b" % event if merged.num_events else event)
                merged.num_events += 1
        out.write(b"\n]}\n")
