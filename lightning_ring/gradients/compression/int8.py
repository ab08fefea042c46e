"""Gradients as 8-bit integers with a scale for each block.

Sources: Dettmers, "8-bit approximations for parallelism in deep learning" (2016), arXiv:1511.04561;
    Wang et al.,
"ZeRO++: extremely efficient collective communication for giant model training" (2023),
arXiv:2306.10209, section 3.3 (qgZ: reduce-scatter by all-to-all); Gan et al., "BAGUA: scaling up
distributed learning with system relaxations" (2021), arXiv:2107.01499 (ByteGrad: both halves of an
all-reduce in 8 bits).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work
from lightning_ring.gradients.compression import blocks
from lightning_ring.gradients.compression.between_nodes import (
    MIN_NUMEL,
    BetweenNodes,
    Part,
    SteppedWork,
)
from lightning_ring.gradients.compression.registry import int8_bytes
from lightning_ring.gradients.compression.two_legs import average_in_two_legs


class Int8(BetweenNodes):
    """``compression="int8"``: about a quarter of the bytes of float32.

    A block of 256 gradients x travels as s = max|x| / 127, in float32, and q = round(x / s), in 8
    bits; it arrives as q·s. The ranks send each other their shards so (all-to-all), each sums its
    shard in float32, and sends the average in the same form (all-gather). Each of the two roundings
    is wrong by s/2 at most. It keeps no error for the next step; ``ErrorFeedback(Int8())`` does. A
    block that holds inf or NaN arrives as NaN or inf.

    Args:
        min_numel: As of `BetweenNodes`.
    """

    name = "int8"
    can_shard = True

    def __init__(self, min_numel: int = MIN_NUMEL) -> None:
        super().__init__(min_numel)

    def wire_bytes(self, numel: int, world_size: int) -> float | None:
        return int8_bytes(numel, world_size)

    def average(self, part: Part) -> Iterator[Work]:
        return average_in_two_legs(part, BLOCKS)

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        """The first leg. On nested rings both, as a rank's shard is not its part of the node's
        average there.
        """
        if flat.numel() < max(self.min_numel, 1):
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        if comm.is_nested:  # on a copy: flags in ``flat`` are read while it travels
            whole = flat.clone()
            return ChainedWork(self.all_reduce(whole, comm, name=name), lambda: flat.copy_(whole))
        part = Part(flat, flat, comm, comm.world_size, None, name)
        return SteppedWork(average_in_two_legs(part, BLOCKS, shard_only=True))


class BlockCode:
    """Messages of `blocks`: the 8-bit values of whole blocks, then a scale for each."""

    def num_bytes(self, numel: int) -> int:
        return -(-numel // blocks.BLOCK) * (blocks.BLOCK + 4)

    def encode(self, values: Tensor, message: Tensor) -> None:
        numbers, scales = _cut(message)
        blocks.encode(values, numbers, scales)

    def decode(self, message: Tensor, values: Tensor) -> None:
        numbers, scales = _cut(message)
        blocks.decode(numbers, scales, values)


BLOCKS = BlockCode()


def _cut(message: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = message.numel() // (blocks.BLOCK + 4)
    numbers, scales = message.split([num_blocks * blocks.BLOCK, num_blocks * 4])
    return numbers.view(torch.int8), scales.view(torch.float32)
