"""Keeps memory that a step frees on the CPU for the next step.

glibc returns freed memory to the system once enough of it lies at the end of its heap, and takes
blocks of some size from the system one by one. Activations and gradients, which are freed in every
step, then come back as new pages in the next one: the kernel zeroes 4 KiB at a time, at the first
touch. GPUs have PyTorch's caching allocator for that.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # the most that glibc takes, and where it ends up by itself

_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
)
_TUNABLES = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold", "glibc.malloc.top_pad")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep what is freed, up to the most that was ever in use at a time; whether it
    does.

    It does not where ``environ`` sets one of glibc's own thresholds, nor with a C library other
    than glibc. Blocks of more than 32 MiB still come and go. See mallopt(3).
    """
    if any(name in environ for name in _VARIABLES):
        return False
    if any(name in environ.get("GLIBC_TUNABLES", "") for name in _TUNABLES):
        return False
    return _mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and _mallopt(
        _M_TRIM_THRESHOLD, _NEVER
    )


def return_freed_memory() -> None:
    """After `keep_freed_memory`: give the system what is free, and from now on more than 64 MiB
    of it.
    """
    if _mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD):
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(parameter: int, value: int) -> bool:
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    return bool(hasattr(library, "mallopt") and library.mallopt(parameter, value))
