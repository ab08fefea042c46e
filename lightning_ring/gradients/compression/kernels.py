"""Where a compressor has Triton kernels beside its torch code."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from torch import Tensor


def triton_kernels(name: str, values: Tensor) -> ModuleType | None:
    """The module ``<name>_triton`` beside this one, for values on a GPU; `None` where there are
    none, or no Triton.
    """
    return _imported(name) if values.is_cuda else None


@functools.cache
def _imported(name: str) -> ModuleType | None:
    try:
        import triton  # noqa: F401  # torch for GPUs may come without it
    except ImportError:
        return None
    return importlib.import_module(f"lightning_ring.gradients.compression.{name}_triton")
