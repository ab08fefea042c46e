"""The Triton kernels of `blocks`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_ring.gradients.compression.blocks import BLOCK, LARGEST, TINY

ROWS = 16  # blocks of one program


def encode(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    num_blocks = triton.cdiv(values.numel(), BLOCK)
    if num_blocks:
        grid = (triton.cdiv(num_blocks, ROWS),)
        encode_kernel[grid](
            values, numbers, scales, values.numel(), TINY, 1 / LARGEST, BLOCK=BLOCK, ROWS=ROWS
        )


def decode(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    num_blocks = triton.cdiv(values.numel(), BLOCK)
    if num_blocks:
        decode_kernel[(triton.cdiv(num_blocks, ROWS),)](
            numbers, scales, values, values.numel(), BLOCK=BLOCK, ROWS=ROWS
        )


@triton.jit
def encode_kernel(  # type: ignore[no-untyped-def]
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
def decode_kernel(  # type: ignore[no-untyped-def]
    numbers, scales, values, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    q = tl.load(numbers + offsets, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    tl.store(values + offsets, q * scale[:, None], mask=inside)
