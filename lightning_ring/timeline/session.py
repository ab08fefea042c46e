"""One timeline from start to stop, on all ranks, and on those that join meanwhile."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.timeline.clocks import ClockReading, DeviceClock, read_clocks
from lightning_ring.timeline.recorder import Recorder
from lightning_ring.timeline.settings import GENERATOR, checked_path
from lightning_ring.timeline.trace_files import (
    TraceFile,
    gather_files,
    merge,
    rank_file,
    remove_earlier,
)

log = logging.getLogger(__name__)

# in this process, by the path that was asked for
_times_started: dict[Path, int] = {}


class Session:
    """What one rank records, in a file of its own, from `start_session` or `join_session` to
    `finish`.

    ``zero`` is the trace's, by this rank's clock; events are those of ``device``. Raises `OSError`:
    the file cannot be written.

    Attributes:
        path: Where rank 0 writes the merged trace.
        recorder: Takes what happens.
        other: The trace's ``otherData``.
        comm: Of the ranks that there are now.
    """

    def __init__(
        self,
        path: Path,
        about: dict[str, Any],
        number: int,
        zero: float,
        clock: ClockReading,
        device: torch.device | None,
    ) -> None:
        self.path = path
        self.comm: Communicator | None = None
        host = socket.gethostname()
        mine = {"rank": number, "host": host, "pid": os.getpid(), "zero": zero}
        self.other = about | {"rank": mine | {"clock": asdict(clock)}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = TraceFile(rank_file(path, number), self.other)
        name = f"{'process' if about.get('ranks_change') else 'rank'} {number} ({host})"
        label = "" if clock.shared else f"clock ±{clock.error * 1e6:.0f} µs"
        seconds_of = DeviceClock(device) if device and is_gpu(device) else None
        self.recorder = Recorder(self._file, number, name, label, zero, seconds_of)

    def finish(self) -> None:
        """Close the ranks' files, and merge them on rank 0. Collective. What goes wrong with
        files is a warning.
        """
        self.merge(self.gather())

    def gather(self) -> list[str]:
        """Close the ranks' files, and bring them to rank 0's folder. Returns problems, the same on
        all ranks.

        Collective; may be called again, where a rank died in it.
        """
        comm = self.comm
        self.close()
        if comm is None:
            return []
        comm.barrier(name="timeline: closed")
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

    def discard(self) -> None:
        """Some rank cannot record: leave no file."""
        self._file.discard()
        self.recorder.close(self.other)

    def merge(self, problems: list[str]) -> None:
        """Write the merged trace, on rank 0, after `gather` has found ``problems``."""
        if self.comm and self.comm.rank:
            return
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
            len(merged.others),
            merged.num_events,
            self.path,
        )


def start_session(
    path: Path,
    comm: Communicator | None,
    *,
    about: dict[str, Any],
    device: torch.device | None = None,
    number: int | None = None,
) -> Session:
    """Open every rank's file. Collective; rank 0's ``path`` counts. ``comm`` is `None` for one
    process alone. ``number``: of this process, where ranks may change; the trace has
    it in the place of the rank.

    A path that was used in this process before gets a number; files of an earlier run are replaced.
    Raises `ConfigurationError`: some rank cannot write its file, or another job is writing it; the
    same on every rank.
    """
    rank, world_size = (comm.rank, comm.world_size) if comm else (0, 1)
    run = {"generator": GENERATOR, "run": uuid.uuid4().hex[:12], "began": _now()}
    problem = ""
    try:
        path = _take_name(path) if rank == 0 else path
    except OSError as error:
        problem = _cannot_write(str(error))
    except ConfigurationError as error:
        problem = str(error)
    if comm:
        path, run, problem = comm.broadcast_object((path, run, problem), name="timeline: start")
    if problem:
        raise ConfigurationError(problem)
    alone = ClockReading(0.0, 0.0, time.perf_counter(), shared=True)
    clocks = read_clocks(comm) if comm else [alone]
    # one zero for all: rank 0's reading, which every rank knows by its own clock
    clock, zero = clocks[rank], clocks[0].at + clocks[rank].offset
    about = run | {"world_size": world_size} | about
    session: Session | None = None
    number = rank if number is None else number
    try:
        session = Session(path, about, number, zero, clock, device)
        session.comm = comm
    except OSError as error:
        problem = f"{rank_file(path, number)}: {error.strerror or error}"
    problems = [problem]
    if comm:
        problems = comm.all_gather_object(problem, name="timeline: problems")
    who = [f"rank {rank}: {found}" for rank, found in enumerate(problems) if found]
    if session and who:
        session.discard()
    if session is None or who:
        raise ConfigurationError(_cannot_write("; ".join(who)))
    return session


def join_session(
    session: Session | None,
    comm: Communicator,
    number: int,
    device: torch.device,
) -> Session | None:
    """Compare clocks, and where this rank has no ``session`` open its file, one more of the trace.
    Collective; rank 0's ``session`` counts.

    A file that cannot be written is a warning: the others record on.
    """
    invitation = None if session is None else (session.path, session.other)
    invitation = comm.broadcast_object(invitation, name="invitation to a timeline")
    if invitation is None:
        return None
    path, other = invitation
    clock = read_clocks(comm)[comm.rank]
    if session:
        return None
    try:
        joined = Session(path, other, number, other["rank"]["zero"] + clock.offset, clock, device)
    except OSError as error:
        log.warning(
            "lightning_ring: process %d joins, and does not record its timeline: %s", number, error
        )
        return None
    joined.comm = comm
    return joined


def _take_name(path: Path) -> Path:
    """The absolute name for this time, with its folder made and files of an earlier run removed."""
    path = checked_path(path, f"The timeline was asked for as {str(path)!r}").absolute()
    number = _times_started.get(path, 0) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    if number == 1:
        remove_earlier(path)
    _times_started[path] = number
    # what one script records is not replaced by what it records next
    return path if number == 1 else path.with_name(f"{path.stem}-{number}.json")


def _cannot_write(why: str) -> str:
    return (
        f"The timeline cannot be written ({why}). Give timeline= or RING_TIMELINE a path of its "
        "own that every rank's host can write, or leave it out."
    )


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
