"""Meetings of ranks that are at different steps: before an evaluation, or to stop together."""

from __future__ import annotations

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded

_PAUSE, _STOP = 0, 1


def meet_for_pause(comm: Communicator) -> None:
    """Return when every rank is here. Ranks that want to stop first (`meet_to_stop`) are sent on. Collective."""
    while not _all_want(_PAUSE, comm):
        pass


def meet_to_stop(comm: Communicator) -> bool:
    """Whether every rank is here: then all stop at once.

    Else some rank is in `meet_for_pause` already, at the end of its epoch: this one trains on, and asks again later.
    """
    return _all_want(_STOP, comm)


def _all_want(what: int, comm: Communicator) -> bool:
    return all(int(other) == what for other in unrecorded(comm).all_gather(torch.tensor([what]), name="meeting"))
