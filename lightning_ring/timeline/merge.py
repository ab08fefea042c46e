"""The ranks' trace files, brought to rank 0's folder and merged into one trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.rank_file import read_events, read_other
from lightning_ring.timeline.settings import rank_file, rank_files
from lightning_ring.timeline.tracks import compact

if TYPE_CHECKING:
    from lightning_ring.comm.communicator import Communicator


def gather_files(path: Path, run: str, comm: Communicator, number: int | None = None) -> list[str]:
    """Bring the files of ``run`` that rank 0 cannot see to rank 0's folder. Collective; all ranks
    have closed theirs.

    ``number`` is that of this rank's file, where it is not the rank's. A file that cannot be read
    or written is left out. Every rank gets the list of problems.
    """
    numbers = comm.all_gather_object(
        comm.rank if number is None else number, name="timeline: numbers"
    )
    unseen: list[int] = []
    if comm.rank == 0:
        unseen = [
            rank for rank, number in enumerate(numbers) if not _is_of(rank_file(path, number), run)
        ]
    problems: list[str] = []
    for rank in comm.broadcast_object(unseen, name="timeline: unseen files"):
        problem = _send(rank_file(path, numbers[rank]), rank, comm)
        if problem:
            problems.append(f"rank {rank}: {problem}")
    return problems


def _is_of(file: Path, run: str) -> bool:
    try:
        return read_other(file).get("run") == run
    except (OSError, ValueError):
        return False


def _send(file: Path, rank: int, comm: Communicator) -> str | None:
    """From ``rank`` to rank 0; every rank takes part."""
    content, problem = b"", None
    if comm.rank == rank:
        try:
            content = file.read_bytes()
        except OSError as error:
            problem = str(error)
    content, problem = comm.broadcast_object((content, problem), src=rank, name="timeline: a file")
    if comm.rank == 0 and problem is None:
        try:
            file.write_bytes(content)
        except OSError as error:
            problem = str(error)
    received: str | None = comm.broadcast_object(problem, name="timeline: problem")
    return received


@dataclass(slots=True)
class Merged:
    """The contents of a merged trace."""

    path: Path
    world_size: int  # of the run
    num_events: int = 0
    ranks: list[int] = field(default_factory=list)  # with a file
    # files that were not closed: the run was killed or still goes on, or a copy was cut short
    unfinished: list[int] = field(default_factory=list)
    clocks: dict[int, dict[str, Any]] = field(default_factory=dict)  # `ClockReading` by rank
    left_out: list[str] = field(default_factory=list)  # files that were not taken, and why

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.ranks]


def timelines_in(folder: Path) -> list[Path]:
    """Names under which ``folder`` holds ranks' files: ``trace.json`` for ``trace.rank0.jsonl``."""
    stems = {file.name.rpartition(".rank")[0] for file in folder.glob("*.rank*.jsonl")}
    names = [folder / f"{stem}.json" for stem in sorted(stems) if stem]
    return [name for name in names if rank_files(name)]


def merge(path: Path, output: Path | None = None) -> Merged:
    """Write the ranks' files of the timeline ``path`` (``trace.json``) to ``output``, by default to
    ``path`` itself.

    The drift of the clocks between start and end is corrected. Only files of the newest run are
    taken. Memory stays small, whatever the size. Raises `ConfigurationError` without a file of a
    rank, `OSError` if writing fails.
    """
    others, left_out = _readable(rank_files(path))
    if not others:
        reasons = (
            "; ".join(left_out)
            or f"there is no {path.stem}.rank0.jsonl or the like in {path.absolute().parent}"
        )
        raise ConfigurationError(
            f"No timeline of a rank can be merged into {path.name}: {reasons}."
        )
    run = max(others.values(), key=lambda other: str(other["began"]))["run"]
    merged = Merged(output or path, world_size=0, left_out=left_out)
    of_run: dict[int, dict[str, Any]] = {}
    for rank, other in others.items():
        if other["run"] == run:
            of_run[rank] = other
        else:
            merged.left_out.append(f"{rank_files(path)[rank].name}: of an earlier run")
    merged.world_size = next(iter(of_run.values()))["world_size"]
    merged.ranks = list(of_run)
    # with those that have joined
    merged.world_size = len({*range(merged.world_size), *merged.ranks})
    merged.clocks = {rank: other["rank"]["clock"] for rank, other in of_run.items()}
    merged.unfinished = [rank for rank, other in of_run.items() if "ended" not in other]
    _write(merged, of_run, rank_files(path))
    return merged


def _readable(files: dict[int, Path]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    others, left_out = {}, []
    for rank, file in files.items():
        try:
            other = read_other(file)
            missing = [key for key in ("run", "began", "world_size", "rank") if key not in other]
            if missing:
                raise ValueError(f"its otherData has no {missing[0]}")
            others[rank] = other
        except (OSError, ValueError) as error:
            left_out.append(f"{file.name}: {error}")
    return others, left_out


def _write(merged: Merged, others: dict[int, dict[str, Any]], files: dict[int, Path]) -> None:
    first = next(iter(others.values()))
    about = {
        "generator": first["generator"],
        "run": first["run"],
        "began": first["began"],
        "world_size": merged.world_size,
        "missing_ranks": merged.missing,
        "unfinished_ranks": merged.unfinished,
        "ranks": {str(rank): other["rank"] for rank, other in others.items()},
    }
    part = merged.path.with_name(merged.path.name + ".part")
    try:
        with open(part, "wb") as out:
            out.write(
                b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n'
                % compact(about).encode()
            )
            for rank, other in others.items():
                for event in _in_step(read_events(files[rank]), other["rank"]):
                    out.write(b",\n%b" % event if merged.num_events else event)
                    merged.num_events += 1
            out.write(b"\n]}\n")
        os.replace(part, merged.path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _in_step(events: Iterator[bytes], rank: dict[str, Any]) -> Iterator[bytes]:
    """``events`` on rank 0's clock, where this rank's clock ran faster or slower than that one
    between the two readings. The first reading's offset is in the events already."""
    start, end = rank.get("clock"), rank.get("clock_at_end")
    if not start or not end or start["shared"] or end["at"] <= start["at"]:
        yield from events
        return
    rate = (end["offset"] - start["offset"]) / (end["at"] - start["at"])
    zero = round((start["at"] - rank["zero"]) * 1e9)

    def corrected(nanoseconds: int) -> int:
        return max(0, nanoseconds - round(rate * (nanoseconds - zero)))

    for text in events:
        event = json.loads(text)
        if event["ph"] == "M":
            yield text
            continue
        begin = round(event["ts"] * 1e3)
        until = corrected(begin + round(event.get("dur", 0) * 1e3))
        event["ts"] = corrected(begin) / 1e3
        event["dur"] = (until - corrected(begin)) / 1e3
        yield compact(event).encode()
