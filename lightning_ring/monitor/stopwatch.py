"""Moments on a device: on CUDA marks in the stream, since the host is far ahead of it."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def now(device: torch.device) -> Mark:
    """On CUDA when the current stream comes to it; nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Mark, ended: Mark) -> float:
    """Waits for ``ended`` where that is a mark on a device."""
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began  # type: ignore[operator]
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
