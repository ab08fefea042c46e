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
from torch.nn.functional import pad

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work
from lightning_ring.gradients.compression.between_nodes import BetweenNodes, Part, SteppedWork
from lightning_ring.gradients.compression.blocks import (
    BLOCK,
    SHARD_VALUES,
    BlockCode,
    average_in_two_legs,
    rows_of,
)
from lightning_ring.host.accelerator import send

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


def decode_int8(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    """Replace ``values`` by ``numbers`` times the scale of their block."""
    for first, rows in rows_of(values):
        rows.copy_(numbers[first * BLOCK :][: rows.numel()].view_as(rows))
        rows.mul_(scales[first : first + len(rows)].unsqueeze(1))


INT8 = BlockCode(BLOCK, encode_int8, decode_int8, "int8")


# the magnitudes of a block, as shares of its largest: 0, 1/64, 1/32, ... 1
_MAGNITUDES = [0.0, *(2.0**power for power in range(-6, 1))]


class FourBit(BetweenNodes):
    """An eighth of the bytes of float32, for the outer gradients of `DiLoCo`: it keeps no error for
    the next average.

    A block of 256 values x travels as s = max|x|, in float32, and for each value its sign and the
    nearest of 0, s/64, s/32, ... s: the eight magnitudes of E3M0 (a sign, three bits of exponent,
    none of mantissa), whose largest is at s. The paper says of its range only that it is E3M0. As
    with `Int8` owners of shards sum in float32. They send the average in the same form, which the
    paper does not say either: there 4 bits are those of the replicas' own gradients.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication: towards a
    distributed free lunch" (2025), arXiv:2501.18512, section 2.4.
    """

    name = "4 bits"

    def average(self, part: Part) -> Iterator[Work]:
        return average_in_two_legs(part, FOUR_BIT)


def _encode_4_bits(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Two to a byte, those of the second half of all values in the high bits."""
    rows = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True)
    scales[: len(rows)].copy_(scale.view(-1))
    middles = send(torch.tensor(_MAGNITUDES), values.device).unfold(0, 2, 1).mean(1)
    code = torch.bucketize(rows.abs() / scale.clamp_min(TINY), middles, out_int32=True)
    low, high = (code + 8 * rows.signbit()).to(torch.uint8).view(2, -1)
    numbers.view(torch.uint8)[: low.numel()].copy_(low + 16 * high)


def _decode_4_bits(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    num_blocks = -(-values.numel() // BLOCK)
    packed = numbers.view(torch.uint8)[: num_blocks * BLOCK // 2]
    code = torch.cat([packed & 15, packed >> 4]).int()
    table = send(torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)]), values.device)
    rows = table[code].view(-1, BLOCK) * scales[:num_blocks].unsqueeze(1)
    values.copy_(rows.view(-1)[: values.numel()])


FOUR_BIT = BlockCode(BLOCK // 2, _encode_4_bits, _decode_4_bits)
