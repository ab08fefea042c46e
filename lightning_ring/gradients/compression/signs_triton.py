"""The Triton kernels of `signs`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_ring.gradients.compression.signs import BLOCK

ROWS = 16  # blocks of one program


def encode(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    if num_blocks := triton.cdiv(values.numel(), BLOCK):
        encode_kernel[(triton.cdiv(num_blocks, ROWS),)](
            values, bits, scales, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


def decode(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    if num_blocks := triton.cdiv(values.numel(), BLOCK):
        decode_kernel[(triton.cdiv(num_blocks, ROWS),)](
            values, bits, scales, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


@triton.jit
def encode_kernel(  # type: ignore[no-untyped-def]
    values, bits, scales, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + offsets, mask=offsets < numel, other=0.0)
    in_rows = rows * BLOCK < numel
    count = tl.minimum(numel - rows * BLOCK, BLOCK).to(tl.float32)
    tl.store(scales + rows, tl.sum(tl.abs(x), axis=1) / count, mask=in_rows)
    flags = tl.reshape((x >= 0).to(tl.int32), (ROWS, BLOCK // 8, 8))
    packed = tl.sum(flags << tl.arange(0, 8)[None, None, :], axis=2)
    bytes_ = rows[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(bits + bytes_, packed.to(tl.int8), mask=in_rows[:, None])


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    values, bits, scales, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = rows * BLOCK < numel
    bytes_ = rows[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    packed = tl.load(bits + bytes_, mask=in_rows[:, None], other=0).to(tl.int32)
    flags = tl.reshape((packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (ROWS, BLOCK))
    scale = tl.load(scales + rows, mask=in_rows, other=0.0)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(
        values + offsets, (2 * flags - 1).to(tl.float32) * scale[:, None], mask=offsets < numel
    )
