"""Runners side by side: torch's fused kernels, and the memory that a step takes."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.ways import (
    assert_near,
    every_optimizer,
    random_params,
    relative_difference,
    take_steps,
)


def test_lars_without_momentum():
    """torch's fused SGD takes no momentum buffer then, which LARS keeps in its state."""
    shapes = [(70_000,), (5, 3)]
    params, others = (random_params(dtype=torch.float32, shapes=shapes) for _ in range(2))
    take_steps(LARS(params, lr=0.1, momentum=0.0), params, 0, 2)
    take_steps(LARS(others, lr=0.1, momentum=0.0, foreach=False), others, 0, 2)
    assert_near(params, others, 1e-6)


def peak_bytes(profile):
    """Largest sum of tensor memory that was taken and not yet given back."""
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak


@pytest.mark.ranks
@every_optimizer
@pytest.mark.parametrize("low_precision", [False, True])
def test_a_step_takes_less_than_five_percent_of_the_parameters_memory(
    optimizer_class, low_precision
):
    dtype = torch.bfloat16 if low_precision else torch.float32
    sizes = [1 << 20] * 3 + [1 << 18] * (48 if low_precision else 16) + [100_003] * 60 + [64] * 100
    params = [torch.ones(size, dtype=dtype, requires_grad=True) for size in sizes]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = optimizer_class(params, lr=0.1, weight_decay=0.01)
    optimizer.step()  # makes the state
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        optimizer.step()
    assert peak_bytes(profile) < 0.05 * sum(param.nbytes for param in params)


@pytest.mark.parametrize("size", [1, 33, 65_543])
def test_lambs_one_sweep_move_leaves_the_state_alone(size):
    """It calls torch's AdamW kernel with betas just below 1, which must not change a bit of the
    averages.
    """
    generator = torch.Generator().manual_seed(size)
    w, m, v, exponents = torch.randn(4, size, dtype=torch.float64, generator=generator)
    m, v = (m * 10 ** (8 * exponents)).float(), (v.square() * 10 ** (-8 * exponents)).float()
    h = SimpleNamespace(rate=0.01, root_scale=0.5, floor=1e-3, weight_decay=0.1)
    weights, before = w.float(), (m.clone(), v.clone())
    assert LAMB.torch_move([weights], [torch.ones(size)], [[m], [v]], h)
    assert torch.equal(m, before[0])
    assert torch.equal(v, before[1])
    change = 0.01 * (m.double() / (0.5 * v.double().sqrt() + 1e-3) + 0.1 * w)
    assert relative_difference(weights, w - change) < 1e-6
