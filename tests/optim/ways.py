"""What the shared battery runs over: every optimizer in ``optim.__all__``, every way to run it
here.
"""

import os

import pytest
import torch

from lightning_ring import optim
from lightning_ring.optim.engine import fused

OPTIMIZERS = [
    getattr(optim, name) for name in optim.__all__ if isinstance(getattr(optim, name), type)
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:  # it takes some milliseconds for each block of a chunk
    fused.CHUNK = 1 << 11
CPU_WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}}
# On the CPU the fused way runs under Triton's interpreter only; the others have had their turn
# without it.
WAYS = {"fused": {"fused": True}} if INTERPRETED else CPU_WAYS

every_optimizer = pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda c: c.__name__)
every_way = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))

SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 3), (4, 3, 3, 3), (300,)]


def random_params(seed=0, dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def set_random_grads(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = grad.to(param.device)


def take_steps(optimizer, params, first, last):
    for step in range(first, last):
        set_random_grads(params, step)
        optimizer.step()


def assert_near(params, expected, tolerance):
    for param, other in zip(params, expected, strict=True):
        assert relative_difference(param, other) < tolerance, param.shape


def assert_equal(params, expected):
    for param, other in zip(params, expected, strict=True):
        assert torch.equal(param, other), param.shape


def relative_difference(actual, expected):
    """Norm of the difference over the norm of ``expected``; 0 for empty tensors."""
    actual, expected = (tensor.detach().double().cpu() for tensor in (actual, expected))
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
