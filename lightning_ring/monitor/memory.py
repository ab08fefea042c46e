"""How much memory a rank holds."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. The CUDA allocator's are zero on other devices.

    Attributes:
        resident: Of this process in memory (its data-loading workers not counted); where the system does not tell,
            its peak so far.
        allocated: In tensors on the device.
        reserved: Held by the allocator.
        peak: Most that was in tensors at once, since the process started or somebody reset it.
    """

    resident: float = 0.0
    allocated: float = 0.0
    reserved: float = 0.0
    peak: float = 0.0

    @classmethod
    def unknown(cls) -> Memory:
        return cls(*[math.nan] * len(fields(cls)))

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        if device.type != "cuda":
            return cls(_resident())
        return cls(
            _resident(),
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_allocated(device),
        )


def _resident() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
