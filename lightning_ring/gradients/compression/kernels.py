"""The Triton kernels of blocks of 8-bit integers and of signs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_ring.gradients.compression.int8 import BLOCK, LARGEST, TINY

ROWS = 16  # blocks of one program


def encode_blocks(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    num_blocks = triton.cdiv(values.numel(), BLOCK)
    if num_blocks:
        grid = (triton.cdiv(num_blocks, ROWS),)
        encode_blocks_kernel[grid](
            values, numbers, scales, values.numel(), TINY, 1 / LARGEST, BLOCK=BLOCK, ROWS=ROWS
        )


def decode_blocks(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    num_blocks = triton.cdiv(values.numel(), BLOCK)
    if num_blocks:
        decode_blocks_kernel[(triton.cdiv(num_blocks, ROWS),)](
            numbers, scales, values, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


@triton.jit
def encode_blocks_kernel(  # type: ignore[no-untyped-def]
    values, numbers, scales, numel, tiny, step, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + offsets, mask=offsets < numel, other=0.0)
    largest = tl.max(tl.abs(x), axis=1)
    # a sum with NaN or inf is neither equal to itself nor finite: maxima may drop NaN
    broken = tl.sum(x * 0.0, axis=1)
    scale = tl.maximum(largest, tiny) * step + broken
    q = x * (1.0 / scale)[:, None]
    q = (q + 12582912.0) - 12582912.0  # 1.5·2²³: the sum has no room for a fraction; ties to even
    in_rows = rows * BLOCK < numel
    tl.store(numbers + offsets, q.to(tl.int8), mask=in_rows[:, None])
    tl.store(scales + rows, scale, mask=in_rows)


@triton.jit
def decode_blocks_kernel(  # type: ignore[no-untyped-def]
    numbers, scales, values, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    q = tl.load(numbers + offsets, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    tl.store(values + offsets, q * scale[:, None], mask=inside)


def encode_signs(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    if num_blocks := triton.cdiv(values.numel(), BLOCK):
        encode_signs_kernel[(triton.cdiv(num_blocks, ROWS),)](
            values, bits, scales, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


def decode_signs(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    if num_blocks := triton.cdiv(values.numel(), BLOCK):
        decode_signs_kernel[(triton.cdiv(num_blocks, ROWS),)](
            values, bits, scales, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


@triton.jit
def encode_signs_kernel(  # type: ignore[no-untyped-def]
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
def decode_signs_kernel(  # type: ignore[no-untyped-def]
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
