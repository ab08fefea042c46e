"""The Triton kernels of blocks of 8-bit integers and of signs: one launch for all rows of messages.

The second dimension of a grid counts rows, the first one groups of blocks. A group of whole blocks
takes a way without masks: a mask whose end is no multiple of 4 values costs the 128-bit loads.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_ring.gradients.compression.blocks import BLOCK
from lightning_ring.gradients.compression.int8 import LARGEST, TINY

ROWS = 8  # blocks of one program: 56 registers at most
_TINY = tl.constexpr(TINY)
_STEP = tl.constexpr(1 / LARGEST)


def encode(code: str, values: Tensor, numbers: Tensor, scales: Tensor, length: int) -> None:
    """Write each ``length`` of 1-D ``values`` to a row of ``numbers`` (int8) and ``scales``."""
    _launch(encode_kernel, code, len(numbers), values, numbers, scales, length)


def decode(
    code: str, values: Tensor, numbers: Tensor, scales: Tensor, length: int, num_messages: int = 1
) -> None:
    """Replace each ``length`` of ``values`` by the average of ``num_messages`` rows."""
    num_shards = len(numbers) // num_messages
    tensors = values, numbers, scales
    _launch(decode_kernel, code, num_shards, *tensors, length, NUM_MESSAGES=num_messages)


def _launch(
    kernel: Any,
    code: str,
    num_shards: int,
    values: Tensor,
    numbers: Tensor,
    scales: Tensor,
    length: int,
    **constants: int,
) -> None:
    numel = values.numel()
    if numel:
        grid = triton.cdiv(min(length, numel), BLOCK * ROWS), num_shards
        strides = numbers.stride(0), scales.stride(0)
        given = values, numbers, scales, numel, length, *strides
        kernel[grid](*given, SIGNS=code == "signs", BLOCK=BLOCK, ROWS=ROWS, **constants)


@triton.jit(do_not_specialize=["numel"])
def encode_kernel(  # type: ignore[no-untyped-def]
    values,
    numbers,
    scales,
    numel,
    length,
    numbers_stride,
    scales_stride,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    shard = tl.program_id(1).to(tl.int64)
    values += shard * length
    numbers += shard * numbers_stride
    scales += shard * scales_stride
    count = tl.minimum(numel - shard * length, length)
    first = tl.program_id(0).to(tl.int64) * ROWS
    if (first + ROWS) * BLOCK <= count:
        _encode(values, numbers, scales, count, first, SIGNS, BLOCK, ROWS, True)
    else:
        _encode(values, numbers, scales, count, first, SIGNS, BLOCK, ROWS, False)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    values,
    numbers,
    scales,
    count,
    first,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    blocks = first + tl.arange(0, ROWS)
    x = _load(values, count, blocks, BLOCK, WHOLE)
    in_rows = blocks * BLOCK < count
    if SIGNS:
        in_block = tl.minimum(count - blocks * BLOCK, BLOCK).to(tl.float32)
        tl.store(scales + blocks, tl.sum(tl.abs(x), axis=1) / in_block, mask=in_rows)
        flags = tl.reshape((x >= 0).to(tl.int32), (ROWS, BLOCK // 8, 8))
        packed = tl.sum(flags << tl.arange(0, 8)[None, None, :], axis=2)
        tl.store(numbers + _offsets(blocks, BLOCK // 8), packed.to(tl.int8), mask=in_rows[:, None])
    else:
        largest = tl.max(tl.abs(x), axis=1)
        # a sum with NaN or inf is neither equal to itself nor finite: maxima may drop NaN
        broken = tl.sum(x * 0.0, axis=1)
        scale = tl.maximum(largest, _TINY) * _STEP + broken
        q = x * (1.0 / scale)[:, None]
        # 1.5·2²³: the sum has no room for a fraction; ties to even
        q = (q + 12582912.0) - 12582912.0
        tl.store(numbers + _offsets(blocks, BLOCK), q.to(tl.int8), mask=in_rows[:, None])
        tl.store(scales + blocks, scale, mask=in_rows)


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(  # type: ignore[no-untyped-def]
    values,
    numbers,
    scales,
    numel,
    length,
    numbers_stride,
    scales_stride,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_MESSAGES: tl.constexpr,
):
    shard = tl.program_id(1).to(tl.int64)
    values += shard * length
    numbers += shard * NUM_MESSAGES * numbers_stride
    scales += shard * NUM_MESSAGES * scales_stride
    count = tl.minimum(numel - shard * length, length)
    first = tl.program_id(0).to(tl.int64) * ROWS
    blocks = first + tl.arange(0, ROWS)
    in_rows = blocks * BLOCK < count
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for _ in range(NUM_MESSAGES):
        if SIGNS:
            packed = tl.load(numbers + _offsets(blocks, BLOCK // 8), mask=in_rows[:, None], other=0)
            flags = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            q = 2 * tl.reshape(flags, (ROWS, BLOCK)) - 1
        else:
            q = tl.load(numbers + _offsets(blocks, BLOCK), mask=in_rows[:, None], other=0)
        total += q.to(tl.float32) * tl.load(scales + blocks, mask=in_rows, other=0.0)[:, None]
        numbers += numbers_stride
        scales += scales_stride
    average = tl.div_rn(total, tl.full((ROWS, BLOCK), NUM_MESSAGES, tl.float32))
    offsets = _offsets(blocks, BLOCK)
    if (first + ROWS) * BLOCK <= count:
        tl.store(values + offsets, average)
    else:
        tl.store(values + offsets, average, mask=offsets < count)


@triton.jit
def _offsets(blocks, width: tl.constexpr):  # type: ignore[no-untyped-def]
    return blocks[:, None] * width + tl.arange(0, width)[None, :]


@triton.jit
def _load(values, count, blocks, BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = _offsets(blocks, BLOCK)
    if WHOLE:
        x = tl.load(values + offsets)
    else:
        x = tl.load(values + offsets, mask=offsets < count, other=0.0)
    return x.to(tl.float32)
