"""Compressors of gradients: one file each, listed in `registry`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ring.gradients.compression.registry import COMPRESSORS

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.bf16 import BF16
    from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout
    from lightning_ring.gradients.compression.error_feedback import ErrorFeedback
    from lightning_ring.gradients.compression.fp16 import FP16
    from lightning_ring.gradients.compression.powersgd import PowerSGD

_MODULES = {
    "BF16": "bf16",
    "Compressor": "compressor",
    "ErrorFeedback": "error_feedback",
    "FP16": "fp16",
    "GradientLayout": "compressor",
    "PowerSGD": "powersgd",
}

__all__ = ["BF16", "COMPRESSORS", "FP16", "Compressor", "ErrorFeedback", "GradientLayout", "PowerSGD"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the registry needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
