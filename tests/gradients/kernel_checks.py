"""The codes' Triton kernels against NumPy in float64: ``python -m tests.gradients.kernel_checks``
under ``TRITON_INTERPRET=1``.
"""

import math

import numpy as np
import torch

from lightning_ring.gradients.compression import kernels
from lightning_ring.gradients.compression.between_nodes import messages
from lightning_ring.gradients.compression.blocks import BLOCK, shard_length
from lightning_ring.gradients.compression.int8 import INT8
from lightning_ring.gradients.compression.one_bit import SIGNS

CODES = {"int8": INT8, "signs": SIGNS}
PROGRAM = kernels.ROWS * BLOCK
SIZES = (0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, PROGRAM - 1, PROGRAM, PROGRAM + 1, 5003)
GUARD = 7.0  # beside values, and never written
GUARDED = 9


def check(name, device):
    for numel in SIZES:
        for num_shards in (1, 3) if numel < 5003 else (1, 2, 3, 4, 5):
            check_values(name, some_values(numel), num_shards, device)
    for numel in (33, BLOCK + 1, 5003):
        for offset in (1, 3):  # values at +4 and +12 bytes, as parts of nodes' averages may be
            check_values(name, some_values(numel), 2, device, offset)
        for dtype in (torch.float16, torch.bfloat16):
            check_values(name, some_values(numel).to(dtype), 2, device)
    for bad in (torch.inf, -torch.inf, torch.nan):
        check_broken_values(name, bad, device)
    check_against_the_cpu(name, device)


def some_values(numel):
    """Of several sizes, with zeros."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.logspace(-3, 2, max(numel, 1))[:numel]
    values[300:860] = 0
    return values


def check_values(name, values, num_shards, device, offset=0):
    """All that a message says, and that nothing else is written."""
    numel, where = values.numel(), f"{name}, {values.numel()} in {num_shards}, +{offset}"
    room = torch.full((offset + numel + GUARDED,), GUARD, dtype=values.dtype, device=device)
    given = room[offset : offset + numel]
    given.copy_(values)
    sent = encoded(name, given, num_shards)
    room.fill_(GUARD)
    decode(name, sent, given)
    assert torch.equal(room[:offset].cpu(), torch.full((offset,), GUARD, dtype=room.dtype)), where
    assert room[offset + numel :].eq(GUARD).all(), where
    found = given.double().cpu().numpy()
    rounding = 2.0 ** -{torch.float16: 10, torch.bfloat16: 7}.get(values.dtype, 22)
    scales, wanted = expected(name, values.double().numpy(), num_shards)
    if name == "int8":  # a tie may be rounded either way
        wrong = np.abs(found - wanted) - (0.5 + 1e-4) * scales
    else:
        wrong = np.abs(found - np.where(wanted >= 0, scales, -scales)) - 1e-5 * scales
    assert (wrong <= rounding * np.abs(found)).all(), (where, wrong.max())
    if name == "int8":
        steps = found / scales
        assert (np.abs(steps - np.round(steps)) <= 1e-4 + 127 * rounding).all(), where
    check_average(name, values.float(), device)


def expected(name, values, num_shards):
    """For each value the scale of its block, and the value."""
    scales = np.zeros_like(values)
    length = math.ceil(len(values) / num_shards / 32) * 32
    for start in range(0, len(values), length or 1):
        for first in range(start, min(start + length, len(values)), BLOCK):
            block = slice(first, min(first + BLOCK, start + length))
            size = np.abs(values[block])
            scales[block] = max(size.max(), 1e-30) / 127 if name == "int8" else size.mean()
    return scales, values


def check_average(name, values, device):
    """Of messages of three ranks, against decoding each of them."""
    ranks = [(values * factor).to(device) for factor in (1, -3, 0.5)]
    sent = torch.cat([encoded(name, each, 1) for each in ranks])
    parts = []
    for row, each in zip(sent.split(1), ranks, strict=True):
        decode(name, row, each)
        parts.append(each.double())
    found = torch.full((values.numel() + GUARDED,), GUARD, device=device)
    numbers, scales = CODES[name]._cut(sent)
    own = found[: values.numel()]
    kernels.decode(name, own, numbers, scales, shard_length(own.numel(), 1), 3)
    assert found[own.numel() :].eq(GUARD).all()
    wanted = torch.stack(parts).mean(0).float()
    largest = float(values.abs().amax()) if values.numel() else 0.0
    torch.testing.assert_close(own, wanted, rtol=1e-6, atol=2e-6 * largest)


def check_broken_values(name, bad, device):
    values = torch.ones(1000, device=device)
    values[300] = bad
    sent = encoded(name, values, 1)
    decode(name, sent, values)
    assert not values[256:512].isfinite().any()
    assert values[:256].isfinite().all()
    assert values[512:].isfinite().all()


def check_against_the_cpu(name, device):
    """Messages of the two ways may be mixed in one job."""
    code = CODES[name]
    values = some_values(40_000)
    ours = messages(3, code.num_bytes(shard_length(40_000, 3)), values)
    code.encode(values, ours)
    numbers, scales = code._cut(ours)
    others, other_scales = (each.cpu() for each in code._cut(encoded(name, values.to(device), 3)))
    torch.testing.assert_close(other_scales, scales, rtol=1e-5, atol=0)
    if name == "signs":
        assert torch.equal(others, numbers)
    assert (others.int() - numbers.int()).abs().max() <= 1
    assert (others == numbers).float().mean() > 0.999


def encoded(name, values, num_shards):
    """Messages of ``values``; the row below them stays as it was."""
    code, length = CODES[name], shard_length(values.numel(), num_shards)
    sent = messages(num_shards + 1, code.num_bytes(length), values)
    sent[-1] = 85
    numbers, scales = code._cut(sent[:-1])
    kernels.encode(name, values, numbers, scales, length)
    assert sent[-1].eq(85).all()
    return sent[:-1]


def decode(name, sent, values):
    numbers, scales = CODES[name]._cut(sent)
    kernels.decode(name, values, numbers, scales, shard_length(values.numel(), len(sent)))


if __name__ == "__main__":
    for code in CODES:
        check(code, "cpu")
    print("equal")
