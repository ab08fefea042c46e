"""Compressors by name: the list that the strategy's options, `lightning-ring plan` and the benchmarks read.

It imports no torch, so that a prediction does not either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.compressor import Compressor


@dataclass(frozen=True, slots=True)
class RegisteredCompressor:
    """A compressor that `RingStrategy` takes by name."""

    module: str  # of this package
    class_name: str  # its arguments have defaults
    wire_bytes: Callable[[int, int], float] | None = None  # as `Compressor.wire_bytes`; `None` where that gives `None`

    def build(self) -> Compressor:
        module = import_module(f"lightning_ring.gradients.compression.{self.module}")
        compressor: Compressor = getattr(module, self.class_name)()
        return compressor


def two_bytes(numel: int, world_size: int) -> float:
    """Two bytes an element, through an ordinary all-reduce."""
    return 2 * numel


def four_bytes(numel: int, world_size: int) -> float:
    return 4 * numel


COMPRESSORS: Mapping[str, RegisteredCompressor] = {
    "fp16": RegisteredCompressor("sixteen_bit", "FP16", two_bytes),
    "bf16": RegisteredCompressor("sixteen_bit", "BF16", two_bytes),
    "fp32": RegisteredCompressor("float32", "FP32", four_bytes),
    "powersgd": RegisteredCompressor("powersgd", "PowerSGD"),
}
