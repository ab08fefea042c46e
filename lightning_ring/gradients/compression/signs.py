"""Blocks of float32 values as signs with a scale each: by torch in pieces that stay in a cache,
or Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ring.gradients.compression.blocks import BLOCK as BLOCK
from lightning_ring.gradients.compression.blocks import piece_size
from lightning_ring.gradients.compression.kernels import triton_kernels

# times 8 bytes that are 0 or 1: their bits in the highest byte, the first one lowest
_GATHER = 0x0102040810204080


def encode(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Write mean|x| of each block x to ``scales``, and x ≥ 0 to ``bits``, the first value in the
    lowest of a byte.

    Args:
        values: 1-D, float32. The last block may be shorter.
        bits: int8, with room for whole blocks.
        scales: float32, one a block.
    """
    if kernels := triton_kernels("signs", values):
        kernels.encode(values, bits, scales)
        return
    whole = values.numel() // BLOCK * BLOCK
    _encode_blocks(values[:whole], bits, scales)
    if rest := values.numel() - whole:  # the mean of the values that are there
        row = whole // BLOCK
        _encode_blocks(pad(values[whole:], (0, BLOCK - rest)), bits[whole // 8 :], scales[row:])
        scales[row].mul_(BLOCK / rest)


def decode(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    """Replace ``values`` by the scale of their block where their bit is set, else by what is
    opposite to it.
    """
    if kernels := triton_kernels("signs", values):
        kernels.decode(bits, scales, values)
        return
    whole = values.numel() // BLOCK * BLOCK
    _decode_blocks(bits, scales, values[:whole])
    if rest := values.numel() - whole:
        last = values.new_empty(BLOCK)
        _decode_blocks(bits[whole // 8 :], scales[whole // BLOCK :], last)
        values[whole:].copy_(last[:rest])


def _encode_blocks(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    size = piece_size(values)
    scratch = torch.empty(min(size, values.numel()), device=values.device)
    flags = torch.empty(scratch.numel(), dtype=torch.bool, device=values.device)
    for start in range(0, values.numel(), size):
        piece = values[start : start + size]
        absolute = torch.abs(piece, out=scratch[: piece.numel()]).view(-1, BLOCK)
        torch.mean(absolute, dim=1, out=scales[start // BLOCK :][: len(absolute)])
        words = torch.ge(piece, 0, out=flags[: piece.numel()]).view(torch.int64)
        words.mul_(_GATHER).bitwise_right_shift_(56)
        bits[start // 8 :][: words.numel()].copy_(words)


def _decode_blocks(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    size = piece_size(values)
    bytes_ = torch.arange(256, device=values.device).unsqueeze(1)
    # of each byte
    signs = ((bytes_ >> torch.arange(8, device=values.device)) & 1).float().mul_(2).sub_(1)
    for start in range(0, values.numel(), size):
        piece = values[start : start + size]
        packed = bits[start // 8 :][: piece.numel() // 8].view(torch.uint8).int()
        torch.index_select(signs, 0, packed, out=piece.view(-1, 8))
        rows = piece.view(-1, BLOCK)
        rows.mul_(scales[start // BLOCK :][: len(rows)].unsqueeze(1))
