"""Marks by the host's clock or in a GPU's stream, the seconds between them, and what a
collective takes by them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import Collective
from lightning_ring.host.accelerator import gpu_module, is_gpu, timed_event

Mark = Any  # a float, or an event


def now(device: torch.device) -> Mark:
    """On a GPU when the current stream comes to it: the host is far ahead of it, and does not
    wait.
    """
    if not is_gpu(device):
        return time.perf_counter()
    event = timed_event(device)
    event.record(gpu_module(device).current_stream(device))
    return event


def is_reached(mark: Mark) -> bool:
    """Whether the device has come to it."""
    return isinstance(mark, (int, float)) or bool(mark.query())


def elapsed(began: Any, ended: Any) -> float:
    """Seconds between two marks that the device has reached."""
    seconds: float = (
        ended - began if isinstance(ended, (int, float)) else began.elapsed_time(ended) / 1e3
    )
    return seconds


def seconds_between(began: Mark, ended: Mark, comm: Communicator | None) -> float:
    """`elapsed`, once the device has reached ``ended``; ``comm`` waits for that."""
    if not isinstance(ended, float):
        if comm is not None:
            comm.wait_until(ended.query)
        else:
            ended.synchronize()
    return elapsed(began, ended)


def time_collective(
    comm: Communicator, collective: Collective, flat: Tensor, repeats: int, name: str
) -> list[float]:
    """Seconds of ``collective`` on ``flat``, ``repeats`` times, after a call that opens what
    others use. Collective.
    """
    seconds = []
    for _ in range(1 + repeats):
        comm.barrier()
        began = now(flat.device)
        getattr(comm, f"{collective}_")(flat, name=name).wait()
        seconds.append(seconds_between(began, now(flat.device), comm))
    return seconds[1:]
