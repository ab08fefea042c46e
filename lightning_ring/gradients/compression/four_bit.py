"""Values as 4-bit floating-point numbers with a scale for each block.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed
    free lunch" (2025),
arXiv:2501.18512, section 2.4: each replica's outer gradients in E3M0 (a sign, three bits of
exponent, none of mantissa), summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ring.comm.communicator import Work
from lightning_ring.gradients.compression import digits
from lightning_ring.gradients.compression.between_nodes import BetweenNodes, Part
from lightning_ring.gradients.compression.blocks import BLOCK, TINY
from lightning_ring.gradients.compression.two_legs import average_in_two_legs

# the magnitudes of a block, as shares of its largest: 0, 1/64, 1/32, ... 1
_MAGNITUDES = [0.0, *(2.0**power for power in range(-6, 1))]


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
        numbers, scales = _cut(message, len(rows))
        scale = rows.abs().amax(1, keepdim=True)
        scales.copy_(scale.view(-1))
        middles = torch.tensor(_MAGNITUDES, device=values.device).unfold(0, 2, 1).mean(1)
        code = torch.bucketize(rows.abs() / scale.clamp_min(TINY), middles, out_int32=True)
        code += 8 * rows.signbit()
        digits.pack(code.to(torch.uint8).view(-1), 16, numbers)

    def decode(self, message: Tensor, values: Tensor) -> None:
        numbers, scales = _cut(message, -(-values.numel() // BLOCK))
        code = numbers.new_empty(2 * numbers.numel())
        digits.unpack(numbers, 16, code)
        table = torch.tensor(
            [*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=values.device
        )
        rows = table[code.int()].view(-1, BLOCK) * scales.unsqueeze(1)
        values.copy_(rows.view(-1)[: values.numel()])


def _cut(message: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    end = num_blocks * BLOCK // 2
    return message[:end], message[end : end + 4 * num_blocks].view(torch.float32)
