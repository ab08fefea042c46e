"""Marks by the host's clock or in a GPU's stream, and the seconds between them."""

from __future__ import annotations

import time
from typing import Any

import torch

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


def seconds_between(began: Mark, ended: Mark) -> float:
    """`elapsed`, once the device has reached ``ended``."""
    if not isinstance(ended, float):
        ended.synchronize()
    return elapsed(began, ended)
