"""Compressors by name: the list that the strategy's options, `lightning-ring plan` and the
benchmarks read.

It imports no torch, so that a prediction does not either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ring.gradients.compression.compressor import Compressor


@dataclass(frozen=True, slots=True)
class RegisteredCompressor:
    """A compressor that `RingStrategy` takes by name."""

    module: str  # of this package
    class_name: str  # its arguments have defaults
    # as `Compressor.wire_bytes`; `None` where that gives `None`
    wire_bytes: Callable[[int, int], float] | None = None

    between_nodes: bool = False  # whether gradients travel in full precision inside a node
    # where the bytes follow from a gradient's shape, and its number of elements
    shape_bytes: Callable[[Sequence[int], int], float] | None = None
    rounds: int = 1  # collectives of an average, each of which waits for the one before
    # whether a bucket's flags travel in one more collective, beside the first
    flags_apart: bool = True

    @property
    def num_collectives(self) -> int:
        """Of a bucket, flags included."""
        return self.rounds + self.flags_apart

    def build(self, **arguments: Any) -> Compressor:
        module = import_module(f"lightning_ring.gradients.compression.{self.module}")
        compressor: Compressor = getattr(module, self.class_name)(**arguments)
        return compressor


def two_bytes(numel: int, world_size: int) -> float:
    """Two bytes an element, through an ordinary all-reduce."""
    return 2 * numel


def four_bytes(numel: int, world_size: int) -> float:
    return 4 * numel


def int8_bytes(numel: int, world_size: int) -> float:
    """A byte an element, and a float32 scale for each block of 256."""
    return numel * (1 + 4 / 256)


def e3m0_bytes(numel: int, world_size: int) -> float:
    """Half a byte an element, and a float32 scale for each block of 256."""
    return numel * (1 / 2 + 4 / 256)


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


def low_rank_bytes(rank: int, min_compression: float, shape: Sequence[int], numel: int) -> float:
    """The two thin factors of a matrix with a row for each output, or all of it where they are
    not much shorter.
    """
    rows = shape[0] if len(shape) > 1 else 1
    columns = numel // rows if rows else 0
    factors = (rows + columns) * min(rows, columns, rank)
    return 4 * (factors if factors * min_compression < numel else numel)


COMPRESSORS: Mapping[str, RegisteredCompressor] = {
    "fp16": RegisteredCompressor("cast", "FP16", two_bytes, flags_apart=False),
    "bf16": RegisteredCompressor("cast", "BF16", two_bytes, flags_apart=False),
    "fp32": RegisteredCompressor("cast", "FP32", four_bytes, flags_apart=False),
    "int8": RegisteredCompressor("int8", "Int8", int8_bytes, between_nodes=True, rounds=2),
    "onebit": RegisteredCompressor(
        "one_bit", "OneBit", one_bit_bytes, between_nodes=True, rounds=2
    ),
    "terngrad": RegisteredCompressor(
        "terngrad", "TernGrad", ternary_bytes, between_nodes=True, rounds=3
    ),
    "topk": RegisteredCompressor("top_k", "TopK", partial(sparse_bytes, 0.01), between_nodes=True),
    "dgc": RegisteredCompressor("dgc", "DGC", partial(sparse_bytes, 0.001), between_nodes=True),
    "powersgd": RegisteredCompressor(
        "powersgd", "PowerSGD", shape_bytes=partial(low_rank_bytes, 2, 2.0), rounds=2
    ),
}
