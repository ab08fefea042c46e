"""One timeline from start to stop, on all ranks."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.clocks import ClockReading, read_clocks
from lightning_ring.timeline.recorder import Recorder, Tracks
from lightning_ring.timeline.settings import GENERATOR, checked_path
from lightning_ring.timeline.trace_files import (
    TraceFile,
    gather_files,
    merge,
    numbered,
    rank_file,
    remove_earlier,
)

log = logging.getLogger(__name__)

_times_started: dict[Path, int] = {}  # in this process, by the path that was asked for


class Session:
    """What one rank records between `start_session` and `finish`.

    Attributes:
        path: Where rank 0 writes the merged trace.
        recorder: Takes what happens.
        other: The trace's ``otherData``.
        comm: Of the ranks that there are now.
    """

    def __init__(
        self, path: Path, other: dict[str, Any], recorder: Recorder, comm: Communicator | None
    ) -> None:
        self.path = path
        self.recorder = recorder
        self.other = other
        self.comm = comm

    def finish(self) -> None:
        """Close the ranks' files, and merge them on rank 0. Collective. What goes wrong with
        files is a warning.
        """
        problems = self.gather()
        if self.comm is None or self.comm.rank == 0:
            self.merge(problems)

    def gather(self) -> list[str]:
        """Close the ranks' files, and bring them to rank 0's folder. Returns problems, the same on
        all ranks.

        Collective; may be called again, where a rank died in it.
        """
        comm = self.comm
        if comm is not None:
            self.other["rank"]["clock_at_end"] = asdict(read_clocks(comm)[comm.rank])
        self.close()
        if comm is None:
            return []
        comm.barrier(name="timeline: closed")  # all files are closed
        problems = gather_files(self.path, self.other["run"], comm, self.other["rank"]["rank"])
        # the source of the last broadcast did not wait for the others
        comm.barrier(name="timeline: merged")
        return problems

    def close(self) -> None:
        """Close this rank's file. Not collective; `lightning-ring timeline` merges what is
        there.
        """
        self.other["ended"] = _now()
        self.recorder.close(self.other)

    def merge(self, problems: list[str]) -> None:
        """Write the merged trace, on rank 0, after `gather` has found ``problems``."""
        try:
            merged = merge(self.path)
        except (OSError, ConfigurationError) as error:
            log.warning("lightning_ring: the timeline was not merged: %s", error)
            return
        for problem in (*problems, *merged.left_out):
            log.warning("lightning_ring: the timeline %s lacks a part: %s", self.path, problem)
        log.info(
            "lightning_ring: timeline of %d rank(s), %d events: %s. Open it in "
            "https://ui.perfetto.dev",
            len(merged.ranks),
            merged.num_events,
            self.path,
        )


def start_session(
    path: Path,
    comm: Communicator | None,
    *,
    max_bytes: int,
    about: dict[str, Any],
    seconds_of: Callable[[Any], float | None] | None = None,
    number: int | None = None,
) -> Session:
    """Open every rank's file. Collective; rank 0's ``path`` and ``max_bytes`` count. ``comm`` is
    `None` for one process alone. ``number``: of this process, where ranks may change; the trace has
    it in the place of the rank.

    A path that was used in this process before gets a number; files of an earlier run are replaced.
    Raises `ConfigurationError`: some rank cannot write its file, or another job is writing it; the
    same on every rank.
    """
    rank, world_size = (comm.rank, comm.world_size) if comm is not None else (0, 1)
    agreed = (str(path), max_bytes, "", "")
    problem: str | None = None
    if rank == 0:
        try:
            agreed = (str(_take_name(path)), max_bytes, uuid.uuid4().hex[:12], _now())
        except OSError as error:
            problem = _cannot_write(str(error))
        except ConfigurationError as error:
            problem = str(error)
    if comm is not None:
        agreed, problem = comm.broadcast_object((agreed, problem), name="timeline: start")
    if problem is not None:
        raise ConfigurationError(problem)
    final, run = Path(agreed[0]), agreed[2]
    clocks = (
        read_clocks(comm)
        if comm is not None
        else [ClockReading(0.0, 0.0, time.perf_counter(), True)]
    )
    # one zero for all: rank 0's reading, which every rank knows by its own clock
    zero = clocks[0].at + clocks[rank].offset
    run_of_all = {
        "generator": GENERATOR,
        "run": run,
        "began": agreed[3],
        "world_size": world_size,
        **about,
    }
    number = rank if number is None else number
    other = run_of_all | {"rank": about_rank(number, zero, clocks[rank])}
    tracks = Tracks(number)
    file = _open_together(rank_file(final, number), other, tracks, clocks[rank], agreed[1], comm)
    return Session(final, other, Recorder(file, tracks, zero, seconds_of), comm)


def about_rank(number: int, zero: float, clock: ClockReading) -> dict[str, Any]:
    """The part of ``otherData`` that each rank has for itself. ``zero``: the trace's, by this
    rank's clock.
    """
    return {
        "rank": number,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "zero": zero,
        "clock": asdict(clock),
    }


def _take_name(path: Path) -> Path:
    """The absolute name for this time, with its folder made and files of an earlier run removed."""
    path = checked_path(path, f"The timeline was asked for as {str(path)!r}").absolute()
    number = _times_started.get(path, 0) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    if number == 1:
        remove_earlier(path)
    _times_started[path] = number
    return numbered(path, number)


def _open_together(
    path: Path,
    other: dict[str, Any],
    tracks: Tracks,
    clock: ClockReading,
    max_bytes: int,
    comm: Communicator | None,
) -> TraceFile:
    file: TraceFile | None = None
    problem: str | None = None
    try:
        file = open_rank_file(path, other, tracks, clock, max_bytes)
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
    problems = (
        comm.all_gather_object(problem, name="timeline: problems")
        if comm is not None
        else [problem]
    )
    if any(problems):
        who = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(problems) if found)
        if file is not None:
            file.discard()
        raise ConfigurationError(_cannot_write(who))
    assert file is not None
    return file


def open_rank_file(
    path: Path, other: dict[str, Any], tracks: Tracks, clock: ClockReading, max_bytes: int
) -> TraceFile:
    """This rank's file, which begins with its name. Raises `OSError`."""
    labels = "" if clock.shared else f"clock ±{clock.error * 1e6:.0f} µs"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = TraceFile(path, other, max_bytes=max_bytes)
    what = "process" if other.get("ranks_change") else "rank"
    file.append(tracks.process(f"{what} {other['rank']['rank']} ({other['rank']['host']})", labels))
    return file


def _cannot_write(why: str) -> str:
    return (
        f"The timeline cannot be written ({why}). Give timeline= or RING_TIMELINE a path of its "
        "own that every rank's host can write, or leave it out."
    )


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a process needs to record with the others: ``zero`` is the trace's, by rank 0's
    clock.
    """

    path: Path
    other: dict[str, Any]
    zero: float
    max_bytes: int


def invitation_to(session: Session, max_bytes: int) -> Invitation:
    """On rank 0."""
    return Invitation(session.path, session.other, session.other["rank"]["zero"], max_bytes)


def join_session(
    invitation: Invitation | None,
    comm: Communicator,
    *,
    number: int,
    joins: bool,
    seconds_of: Callable[[Any], float | None] | None = None,
) -> Session | None:
    """Compare clocks, and where this rank ``joins`` open its file. Collective; rank 0's
    ``invitation`` counts.

    A file that cannot be written is a warning: the others record on.
    """
    invitation = comm.broadcast_object(invitation, name="invitation to a timeline")
    if invitation is None:
        return None
    clock = read_clocks(comm)[comm.rank]
    if not joins:
        return None
    zero = invitation.zero + clock.offset
    other = invitation.other | {"rank": about_rank(number, zero, clock)}
    tracks = Tracks(number)
    try:
        file = open_rank_file(
            rank_file(invitation.path, number), other, tracks, clock, invitation.max_bytes
        )
    except OSError as error:
        log.warning(
            "lightning_ring: process %d joins, and does not record its timeline: %s", number, error
        )
        return None
    return Session(invitation.path, other, Recorder(file, tracks, zero, seconds_of), comm)
