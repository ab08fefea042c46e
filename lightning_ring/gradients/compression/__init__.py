"""Compressors of gradients, by name in `COMPRESSORS`. The table needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.cast import BF16, FP16, FP32
    from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout
    from lightning_ring.gradients.compression.dgc import DGC
    from lightning_ring.gradients.compression.error_feedback import ErrorFeedback
    from lightning_ring.gradients.compression.int8 import Int8
    from lightning_ring.gradients.compression.one_bit import OneBit
    from lightning_ring.gradients.compression.powersgd import PowerSGD
    from lightning_ring.gradients.compression.terngrad import TernGrad
    from lightning_ring.gradients.compression.top_k import TopK

__all__ = [
    "BF16",
    "COMPRESSORS",
    "DGC",
    "FP16",
    "FP32",
    "Compressor",
    "ErrorFeedback",
    "GradientLayout",
    "Int8",
    "OneBit",
    "PowerSGD",
    "TernGrad",
    "TopK",
]


@dataclass(frozen=True, slots=True)
class RegisteredCompressor:
    """A compressor that `RingStrategy` takes by name."""

    module: str  # of this package
    class_name: str  # its arguments have defaults

    def build(self) -> Compressor:
        compressor: Compressor = __getattr__(self.class_name)()
        return compressor


COMPRESSORS: Mapping[str, RegisteredCompressor] = {
    "fp16": RegisteredCompressor("cast", "FP16"),
    "bf16": RegisteredCompressor("cast", "BF16"),
    "fp32": RegisteredCompressor("cast", "FP32"),
    "int8": RegisteredCompressor("int8", "Int8"),
    "onebit": RegisteredCompressor("one_bit", "OneBit"),
    "terngrad": RegisteredCompressor("terngrad", "TernGrad"),
    "topk": RegisteredCompressor("top_k", "TopK"),
    "dgc": RegisteredCompressor("dgc", "DGC"),
    "powersgd": RegisteredCompressor("powersgd", "PowerSGD"),
}
_MODULES = {known.class_name: known.module for known in COMPRESSORS.values()} | {
    "Compressor": "compressor",
    "ErrorFeedback": "error_feedback",
    "GradientLayout": "compressor",
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for, and torch with it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
