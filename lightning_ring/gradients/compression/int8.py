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
from lightning_ring.gradients.compression.between_nodes import (
    MIN_NUMEL,
    BetweenNodes,
    Part,
    SteppedWork,
    average_in_two_legs,
    triton_kernels,
)
from lightning_ring.gradients.compression.registry import int8_bytes

BLOCK = 256  # values that share a scale
CHUNK = 1 << 16  # values of a piece: 256 KiB, beside which its copy fits into 1 MiB of cache
LARGEST = 127
TINY = 1e-30  # the least maximum, whose reciprocal is finite


# the magnitudes of a block, as shares of its largest: 0, 1/64, 1/32, ... 1
_MAGNITUDES = [0.0, *(2.0**power for power in range(-6, 1))]


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
        return -(-numel // BLOCK) * (BLOCK + 4)

    def encode(self, values: Tensor, message: Tensor) -> None:
        numbers, scales = _cut(message)
        encode_blocks(values, numbers, scales)

    def decode(self, message: Tensor, values: Tensor) -> None:
        numbers, scales = _cut(message)
        decode_blocks(numbers, scales, values)


BLOCKS = BlockCode()


def _cut(message: Tensor) -> tuple[Tensor, Tensor]:
    num_blocks = message.numel() // (BLOCK + 4)
    numbers, scales = message.split([num_blocks * BLOCK, num_blocks * 4])
    return numbers.view(torch.int8), scales.view(torch.float32)


def encode_blocks(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Write s = max|x|/127 of each block x to ``scales``, and round(x/s) to ``numbers``.

    Args:
        values: 1-D, float32. The last block may be shorter.
        numbers: int8, with room for whole blocks.
        scales: float32, one a block.
    """
    if kernels := triton_kernels(values):
        kernels.encode_blocks(values, numbers, scales)
        return
    whole = values.numel() // BLOCK * BLOCK
    _encode_whole_blocks(values[:whole], numbers[:whole], scales[: whole // BLOCK])
    if rest := values.numel() - whole:
        last = slice(whole, whole + BLOCK)
        _encode_whole_blocks(
            pad(values[whole:], (0, BLOCK - rest)), numbers[last], scales[whole // BLOCK :][:1]
        )


def decode_blocks(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    """Replace ``values`` by ``numbers`` times the scale of their block."""
    if kernels := triton_kernels(values):
        kernels.decode_blocks(numbers, scales, values)
        return
    whole = values.numel() // BLOCK * BLOCK
    size = piece_size(values)
    for start in range(0, whole, size):
        out = values[start : min(start + size, whole)].view(-1, BLOCK)
        out.copy_(numbers[start : start + out.numel()].view_as(out))
        out.mul_(scales[start // BLOCK :][: len(out)].unsqueeze(1))
    if rest := values.numel() - whole:
        values[whole:].copy_(numbers[whole : whole + rest]).mul_(scales[whole // BLOCK])


def _encode_whole_blocks(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    size = piece_size(values)
    memory = torch.empty(min(size, values.numel()), device=values.device)
    for start in range(0, values.numel(), size):
        piece = values[start : start + size].view(-1, BLOCK)
        scratch = memory[: piece.numel()].view_as(piece)
        scale = scales[start // BLOCK :][: len(piece)]
        # four times as fast as one aminmax
        torch.amax(torch.abs(piece, out=scratch), dim=1, out=scale)
        scale.clamp_min_(TINY).div_(LARGEST)
        torch.mul(piece, scale.reciprocal().unsqueeze(1), out=scratch).round_()
        numbers[start : start + size].view_as(piece).copy_(scratch)


def piece_size(values: Tensor) -> int:
    """How many values are worked on at once: on CPUs as many as stay in a cache."""
    return CHUNK if values.device.type == "cpu" else max(values.numel(), BLOCK)


class FourBit(BetweenNodes):
    """An eighth of the bytes of float32, for the outer gradients of `DiLoCo`: it keeps no error for
    the next average.

    A block of 256 values x travels as s = max|x|, in float32, and for each value its sign and the
    nearest of 0, s/64, s/32, ... s: the eight magnitudes of E3M0, whose largest is at s. The paper
    says of its range only that it is E3M0. As with `Int8` owners of shards sum in float32. They
    send the average in the same form, which the paper does not say either: there 4 bits are those
    of the replicas' own gradients.
    """

    name = "4 bits"

    def average(self, part: Part) -> Iterator[Work]:
        return average_in_two_legs(part, _FourBitCode())


class _FourBitCode:
    """Messages of the numbers of whole blocks, two to a byte, then a scale for each block."""

    def num_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (BLOCK // 2 + 4)

    def encode(self, values: Tensor, message: Tensor) -> None:
        rows = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        numbers, scales = _cut_4_bits(message, len(rows))
        scale = rows.abs().amax(1, keepdim=True)
        scales.copy_(scale.view(-1))
        middles = torch.tensor(_MAGNITUDES, device=values.device).unfold(0, 2, 1).mean(1)
        code = torch.bucketize(rows.abs() / scale.clamp_min(TINY), middles, out_int32=True)
        code += 8 * rows.signbit()
        low, high = code.to(torch.uint8).view(2, -1)
        torch.add(low, high, alpha=16, out=numbers)

    def decode(self, message: Tensor, values: Tensor) -> None:
        numbers, scales = _cut_4_bits(message, -(-values.numel() // BLOCK))
        code = numbers.new_empty(2 * numbers.numel())
        torch.stack([numbers & 15, numbers >> 4], out=code.view(2, -1))
        table = torch.tensor(
            [*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=values.device
        )
        rows = table[code.int()].view(-1, BLOCK) * scales.unsqueeze(1)
        values.copy_(rows.view(-1)[: values.numel()])


def _cut_4_bits(message: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    end = num_blocks * BLOCK // 2
    return message[:end], message[end : end + 4 * num_blocks].view(torch.float32)
