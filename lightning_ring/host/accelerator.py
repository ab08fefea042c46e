"""GPUs through torch's device-generic calls: NVIDIA's and AMD's are ``cuda`` to torch, Intel's
``xpu``.

What was run on which of them is in docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# torch's backend of the vendor's collectives; on AMD's GPUs that which torch calls nccl is RCCL
COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}


def is_gpu(device: torch.device) -> bool:
    return device.type in COLLECTIVES


def gpu_module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.xpu``: their functions have the same names."""
    return torch.get_device_module(device)


def gpu_kind() -> str:
    """The kind of GPU that this process sees, ``""`` for none. Starts no driver's context."""
    return next((kind for kind in COLLECTIVES if gpu_module(torch.device(kind)).device_count()), "")


def vendor(kind: str) -> str:
    """Of the GPUs of this kind, by what this torch was built for."""
    if kind == "xpu":
        return "Intel"
    return "AMD" if torch.version.hip else "NVIDIA"


def started_gpus() -> Iterator[tuple[str, Any]]:
    """The kinds of GPU that this process has used, and torch's module of each."""
    for kind in COLLECTIVES:
        module = gpu_module(torch.device(kind))
        # a flag first: the other question may reach a driver
        if module.is_initialized() and module.is_available():
            yield kind, module


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued; nothing on a CPU."""
    if is_gpu(device):
        gpu_module(device).synchronize(device)


def timed_event(device: torch.device) -> Any:
    """An event that tells times, not recorded yet."""
    return gpu_module(device).Event(enable_timing=True)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` (on the CPU, or there already) on ``device``, without waiting for the device."""
    if is_gpu(device) and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
