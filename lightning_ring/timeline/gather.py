"""Every rank's trace file in rank 0's folder, where the ranks share no file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ring.timeline.paths import rank_file
from lightning_ring.timeline.rank_file import read_other

if TYPE_CHECKING:
    from lightning_ring.comm.communicator import Communicator

_PIECE = 4 << 20  # bytes in memory, and on the wire at a time


def gather_files(path: Path, run: str, comm: Communicator) -> list[str]:
    """Bring the files of ``run`` that rank 0 cannot see to rank 0's folder. Collective; all ranks have closed theirs.

    A file that cannot be read or written is left out, on every rank alike.

    Returns:
        On every rank, what went wrong.
    """
    unseen: list[int] = []
    if comm.rank == 0:
        unseen = [rank for rank in range(comm.world_size) if not _is_of(rank_file(path, rank), run)]
    problems: list[str] = []
    for rank in comm.broadcast_object(unseen):
        problem = _send(rank_file(path, rank), rank, comm)
        if problem:
            problems.append(f"rank {rank}: {problem}")
    return problems


def _is_of(file: Path, run: str) -> bool:
    try:
        return read_other(file).get("run") == run
    except (OSError, ValueError):
        return False


def _send(file: Path, rank: int, comm: Communicator) -> str | None:
    """From ``rank`` to rank 0, piece by piece; every rank takes part in every piece."""
    size, problem = 0, None
    if comm.rank == rank:
        try:
            size = file.stat().st_size
        except OSError as error:
            problem = str(error)
    size, problem = comm.broadcast_object((size, problem), src=rank)
    part = file.with_name(file.name + ".part")
    for offset in range(0, size, _PIECE):
        piece = b""
        if comm.rank == rank and problem is None:
            try:
                piece = _read(file, offset)
            except OSError as error:
                problem = str(error)
        piece = comm.broadcast_object(piece, src=rank)
        if comm.rank == 0 and problem is None:
            try:
                with open(part, "r+b" if offset else "wb") as out:
                    out.seek(offset)
                    out.write(piece)
            except OSError as error:
                problem = str(error)
    if comm.rank == 0 and problem is None:
        try:
            os.replace(part, file)
        except OSError as error:  # a file that came empty, for instance, has no part
            problem = str(error)
    problems = comm.all_gather_object(problem)
    return next((found for found in problems if found), None)


def _read(file: Path, offset: int) -> bytes:
    with open(file, "rb") as source:
        source.seek(offset)
        return source.read(_PIECE)
