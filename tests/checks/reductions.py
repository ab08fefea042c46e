"""Values for reductions, and the plain reductions that communicators are compared with."""

import torch

from lightning_ring.comm.communicator import ReduceOp

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
HALVES = [torch.float16, torch.bfloat16]


def values(numel, dtype, world_size):
    generator = torch.Generator().manual_seed(numel + world_size)
    if dtype is torch.bool:
        return [torch.rand(numel, generator=generator) < 0.5 for _ in range(world_size)]
    if dtype in INTEGERS:
        return [
            torch.randint(1, 4, (numel,), generator=generator).to(dtype) for _ in range(world_size)
        ]
    real = [torch.randn(numel, dtype=torch.float64, generator=generator) for _ in range(world_size)]
    if dtype.is_complex:
        return [torch.complex(part, part.flip(0) * 2).to(dtype) for part in real]
    return [part.to(dtype) for part in real]


def plain(inputs, op):
    """The same reduction without a ring, in double precision."""
    dtype = inputs[0].dtype
    wide = torch.stack(
        [tensor.to(torch.float64 if dtype in FLOATS else dtype) for tensor in inputs]
    )
    if op is ReduceOp.MIN:
        return wide.amin(0).to(dtype)
    if op is ReduceOp.MAX:
        return wide.amax(0).to(dtype)
    if op is ReduceOp.PRODUCT:
        return wide.prod(0).to(dtype)
    total = wide.sum(0)
    if op is ReduceOp.AVG:
        total = total.div(len(inputs), rounding_mode="trunc" if dtype in INTEGERS else None)
    return total.to(dtype)


def tolerance(dtype):
    bits = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.complex64: 1e-4}
    return {"rtol": bits.get(dtype, 1e-9), "atol": bits.get(dtype, 1e-9)}


def allowed():
    pairs = [(dtype, op) for dtype in FLOATS + INTEGERS for op in ReduceOp]
    pairs += [
        (dtype, op) for dtype in COMPLEX for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    ]
    return [*pairs, (torch.bool, ReduceOp.MIN), (torch.bool, ReduceOp.MAX)]


def rounded_once(inputs, op):
    total = inputs[0].float()
    for tensor in inputs[1:]:
        total = total + tensor.float()
    return (total / len(inputs) if op is ReduceOp.AVG else total).to(inputs[0].dtype)
