"""Compressors by name, and the bytes that they send. It imports no torch."""

from __future__ import annotations

import math
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


def int8_bytes(numel: int, world_size: int) -> float:
    """A byte an element, and a float32 scale for each block of 256."""
    return numel * (1 + 4 / 256)


def one_bit_bytes(numel: int, world_size: int) -> float:
    """A bit an element, and a float32 scale for each block of 256."""
    return numel * (1 / 8 + 4 / 256)


def sparse_bytes(ratio: float, numel: int, world_size: int) -> float:
    """A value and a place of 4 bytes each for a share of the elements, which every rank gathers
    from all.
    """
    return min(8 * math.ceil(ratio * numel) * world_size / 2, 4 * numel)


def ternary_bytes(numel: int, world_size: int) -> float:
    """Ternary digits on the way to the sum, digits of base 2N + 1 on the way back."""
    return numel * (1 / digits_a_byte(3) + 1 / digits_a_byte(2 * world_size + 1)) / 2


def digits_a_byte(base: int) -> int:
    """How many digits of ``base``, which is 256 at most, fit into a byte."""
    return next((count for count in (8, 5, 4, 3, 2) if base**count <= 256), 1)


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
