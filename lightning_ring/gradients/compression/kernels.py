"""The Triton kernels of blocks of 8-bit integers and of signs."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_ring.gradients.compression.blocks import BLOCK
from lightning_ring.gradients.compression.int8 import LARGEST, TINY

ROWS = 16  # blocks of one program


def encode_int8(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
    _launch(encode_int8_kernel, values, numbers, scales, TINY, 1 / LARGEST)


def decode_int8(numbers: Tensor, scales: Tensor, values: Tensor) -> None:
    _launch(decode_int8_kernel, values, numbers, scales)


def encode_signs(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    _launch(encode_signs_kernel, values, bits, scales)


def decode_signs(bits: Tensor, scales: Tensor, values: Tensor) -> None:
    _launch(decode_signs_kernel, values, bits, scales)


def _launch(
    kernel: Any, values: Tensor, numbers: Tensor, scales: Tensor, *constants: float
) -> None:
    if programs := triton.cdiv(values.numel(), BLOCK * ROWS):
        kernel[(programs,)](
            values, numbers, scales, values.numel(), *constants, BLOCK=BLOCK, ROWS=ROWS
        )


@triton.jit
def encode_int8_kernel(  # type: ignore[no-untyped-def]
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
def decode_int8_kernel(  # type: ignore[no-untyped-def]
    values, numbers, scales, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < numel
    q = tl.load(numbers + offsets, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0)
    tl.store(values + offsets, q * scale[:, None], mask=inside)


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
