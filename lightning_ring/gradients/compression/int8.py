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
from lightning_ring.gradients.compression.between_nodes import BetweenNodes, Part, SteppedWork
from lightning_ring.gradients.compression.blocks import (
    BLOCK,
    SHARD_VALUES,
    BlockCode,
    average_in_two_legs,
    rows_of,
)

LARGEST = 127
TINY = 1e-30  # the least maximum, whose reciprocal is finite


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

    def average(self, part: Part) -> Iterator[Work]:
        return average_in_two_legs(part, INT8)

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        """The first leg. On nested rings both, as a rank's shard is not its part of the node's
        average there; so where shards do not begin at multiples of 128 bytes, as those of sharded
        buckets do.
        """
        if flat.numel() < max(self.min_numel, 1):
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        aligned = flat.numel() % (comm.world_size * SHARD_VALUES) == 0
        if comm.is_nested or not aligned:  # on a copy: flags in ``flat`` are read while it travels
            whole = flat.clone()
            return ChainedWork(self.all_reduce(whole, comm, name=name), lambda: flat.copy_(whole))
        part = Part(flat, flat, comm, None, name)
        return SteppedWork(average_in_two_legs(part, INT8, shard_only=True))


def encode_int8(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Write s = max|x|/127 of each block x to ``scales``, and round(x/s) to ``numbers``."""
    for first, rows in rows_of(values):
        scale = scales[first : first + len(rows)]
        scratch = rows.abs()
        torch.amax(scratch, dim=1, out=scale)  # four times as fast as one aminmax
        scale.clamp_min_(TINY).div_(LARGEST)
        torch.mul(rows, scale.reciprocal().unsqueeze(1), out=scratch).round_()
        numbers[first * BLOCK :][: rows.numel()].view_as(rows).copy_(scratch)


def decode_int8(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Replace ``values`` by ``numbers`` times the scale of their block."""
    for first, rows in rows_of(values):
        rows.copy_(numbers[first * BLOCK :][: rows.numel()].view_as(rows))
        rows.mul_(scales[first : first + len(rows)].unsqueeze(1))


INT8 = BlockCode(BLOCK, encode_int8, decode_int8, "int8")
