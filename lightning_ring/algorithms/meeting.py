"""Meetings of ranks that are at different steps: before an evaluation, or to stop together."""

from __future__ import annotations

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded

_STOP, _PAUSE, _PAUSE_AFTER_STEPS = range(3)


def meet_for_pause(comm: Communicator, *, after_steps: bool) -> bool:
    """Return when every rank is here: whether any of them comes ``after_steps`` since they last
    met. Collective.

    Ranks that want to stop first (`meet_to_stop`) are sent on.
    """
    while _STOP in (wanted := _all_want(_PAUSE_AFTER_STEPS if after_steps else _PAUSE, comm)):
        pass
    return _PAUSE_AFTER_STEPS in wanted


def meet_to_stop(comm: Communicator) -> bool:
    """Whether every rank is here: then all stop at once.

    Else some rank is in `meet_for_pause` already, at the end of its epoch: this one trains on, and
    asks again later.
    """
    return set(_all_want(_STOP, comm)) == {_STOP}


def _all_want(what: int, comm: Communicator) -> list[int]:
    return [
        int(other) for other in unrecorded(comm).all_gather(torch.tensor([what]), name="meeting")
    ]
