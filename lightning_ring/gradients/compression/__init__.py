"""Compressors of gradients: listed in `registry`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ring.gradients.compression.registry import COMPRESSORS

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout
    from lightning_ring.gradients.compression.error_feedback import ErrorFeedback
    from lightning_ring.gradients.compression.float32 import FP32
    from lightning_ring.gradients.compression.powersgd import PowerSGD
    from lightning_ring.gradients.compression.sixteen_bit import BF16, FP16

_MODULES = {
    "BF16": "sixteen_bit",
    "Compressor": "compressor",
    "ErrorFeedback": "error_feedback",
    "FP16": "sixteen_bit",
    "FP32": "float32",
    "GradientLayout": "compressor",
    "PowerSGD": "powersgd",
}

__all__ = ["BF16", "COMPRESSORS", "FP16", "FP32", "Compressor", "ErrorFeedback", "GradientLayout", "PowerSGD"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the registry needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
