"""GPUs through torch's device-generic calls: NVIDIA's and AMD's are ``cuda`` to torch, Intel's ``xpu``.

Only NVIDIA's and the CPU's were thought through to the end; what was run is in docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# torch's backend of the vendor's collectives; on AMD's GPUs that which torch calls nccl is RCCL
COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}


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
