"""A process that joins while others record: its file is one more of their trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ring.comm.communicator import Communicator
from lightning_ring.timeline.clocks import read_clocks
from lightning_ring.timeline.recorder import Recorder
from lightning_ring.timeline.session import Session, about_rank, open_rank_file
from lightning_ring.timeline.settings import rank_file
from lightning_ring.timeline.tracks import Tracks

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
