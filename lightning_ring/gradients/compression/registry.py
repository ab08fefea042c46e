"""Compressors by name. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.compressor import Compressor


@dataclass(frozen=True, slots=True)
class RegisteredCompressor:
    """A compressor that `RingStrategy` takes by name."""

    module: str  # of this package
    class_name: str  # its arguments have defaults

    def build(self, **arguments: Any) -> Compressor:
        module = import_module(f"lightning_ring.gradients.compression.{self.module}")
        compressor: Compressor = getattr(module, self.class_name)(**arguments)
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
