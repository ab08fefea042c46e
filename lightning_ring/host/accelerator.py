"""GPUs through torch's device-generic calls: NVIDIA's and AMD's are ``cuda`` to torch, Intel's ``xpu``.

Only NVIDIA's and the CPU's were thought through to the end; what was run is in docs/compatibility.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

# torch's backend of the vendor's collectives; on AMD's GPUs that which torch calls nccl is RCCL
COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}

Mark = Any  # seconds of `time.perf_counter`, or an event on a GPU's stream


def is_gpu(device: torch.device) -> bool:
    return device.type in COLLECTIVES


def gpu_module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.xpu``: their functions have the same names."""
    return torch.get_device_module(device)


def started_gpus() -> Iterator[tuple[str, Any]]:
    """The kinds of GPU that this process has used, and torch's module of each."""
    for kind in COLLECTIVES:
        module = gpu_module(torch.device(kind))
        if module.is_available() and module.is_initialized():
            yield kind, module


def timed_event(device: torch.device) -> Any:
    """An event that tells times, not recorded yet."""
    return gpu_module(device).Event(enable_timing=True)


def mark(device: torch.device) -> Mark:
    """Now; on a GPU when the current stream comes to it, since the host is far ahead. Nothing waits."""
    if not is_gpu(device):
        return time.perf_counter()
    event = timed_event(device)
    event.record()
    return event


def seconds_between(began: Mark, ended: Mark) -> float:
    """Between two marks that the device has come to."""
    if isinstance(began, float) or isinstance(ended, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1e3


def is_reached(mark: Mark) -> bool:
    """Whether the device has come to it."""
    return isinstance(mark, float) or bool(mark.query())
