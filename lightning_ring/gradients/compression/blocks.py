"""Blocks of float32 values as 8-bit integers with a scale each: by torch in pieces that stay in
a cache, or Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ring.gradients.compression.kernels import triton_kernels

BLOCK = 256  # values that share a scale
CHUNK = 1 << 16  # values of a piece: 256 KiB, beside which its copy fits into 1 MiB of cache
LARGEST = 127
TINY = 1e-30  # the least maximum, whose reciprocal is finite


def encode(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """Write s = max|x|/127 of each block x to ``scales``, and round(x/s) to ``numbers``.

    Args:
        values: 1-D, float32. The last block may be shorter.
        numbers: int8, with room for whole blocks.
        scales: float32, one a block.
    """
    if kernels := triton_kernels("blocks", values):
        kernels.encode(values, numbers, scales)
        return
    whole = values.numel() // BLOCK * BLOCK
    _encode_blocks(values[:whole], numbers[:whole], scales[: whole // BLOCK])
    if rest := values.numel() - whole:
        last = slice(whole, whole + BLOCK)
        _encode_blocks(
            pad(values[whole:], (0, BLOCK - rest)), numbers[last], scales[whole // BLOCK :][:1]
        )


def decode(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    """Replace ``values`` by ``numbers`` times the scale of their block."""
    if kernels := triton_kernels("blocks", values):
        kernels.decode(numbers, scales, values)
        return
    whole = values.numel() // BLOCK * BLOCK
    size = piece_size(values)
    for start in range(0, whole, size):
        out = values[start : min(start + size, whole)].view(-1, BLOCK)
        out.copy_(numbers[start : start + out.numel()].view_as(out))
        out.mul_(scales[start // BLOCK :][: len(out)].unsqueeze(1))
    if rest := values.numel() - whole:
        values[whole:].copy_(numbers[whole : whole + rest]).mul_(scales[whole // BLOCK])


def _encode_blocks(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
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
