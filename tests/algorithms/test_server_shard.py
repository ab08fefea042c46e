"""One parameter server by itself: delay compensation, averages, parts of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_ring.algorithms.parts import parts_of
from lightning_ring.algorithms.server.server import WeightServer, average, settings_of


def server_of(num_workers: int, **how: Any) -> tuple[WeightServer, list[Tensor]]:
    """A server of one parameter, and where a worker's weights go."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    server = WeightServer(SGD([weight], 0.1), [weight], *parts_of([weight], 1), num_workers, **how)
    return server, [torch.zeros(6, dtype=torch.float64)]


SETTINGS = settings_of(SGD([nn.Parameter(torch.zeros(1))], 0.1))


@pytest.mark.parametrize("compensation", [None, 0.3])
def test_delay_compensation_is_equation_10_of_the_paper(compensation: float | None) -> None:
    """w ← w - lr · (g + λ g ⊙ g ⊙ (w - w_r)), for pushes that come in an order of their own;
    three workers.
    """
    server, pulled = server_of(3, compensation=compensation)
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64).numpy()
    seen = [weights.copy() for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    order = [0, 1, 1, 0, 2, 1, 2, 2, 0]
    last = [0, 0, 0]
    for number, worker in enumerate(order):
        gradient = torch.randn(6, dtype=torch.float64, generator=generator)
        delay = server.push(worker, pulled, [gradient.clone()], SETTINGS)
        g = gradient.numpy()
        weights = weights - 0.1 * (g + (compensation or 0.0) * g * g * (weights - seen[worker]))
        seen[worker] = weights.copy()
        assert delay == number - last[worker]
        last[worker] = number + 1
        torch.testing.assert_close(pulled[0], torch.from_numpy(weights), rtol=1e-12, atol=1e-12)


def test_a_gradient_that_some_ranks_lack_counts_as_zero_there() -> None:
    gradient = torch.tensor([3.0, 6.0])
    for dtype in (torch.float32, torch.bfloat16):
        mean = average([None, gradient.to(dtype), None])
        assert mean is not None
        assert mean.dtype == dtype
        assert mean.tolist() == [1.0, 2.0]
    assert average([None, None]) is None


def test_whole_parameters_are_spread_and_their_messages_have_room_for_each() -> None:
    params = [torch.randn(size) for size in ((3, 5), (7,), (0,), (1,), (2, 3, 4, 4))]
    params[2] = params[2].double()
    params[4] = params[4].contiguous(memory_format=torch.channels_last)
    for num_parts in (1, 2, 3, 40):
        parts = parts_of(params, num_parts)
        assert sorted(index for part in parts for index in part.indices) == [*range(5)]
        assert max(part.nbytes for part in parts) <= max(384, 512 // num_parts)
        for part in parts:
            views = part.views(torch.zeros(part.nbytes, dtype=torch.uint8), params)
            own = [params[index] for index in part.indices]
            torch._foreach_copy_(views, own)
            assert all(map(torch.equal, views, own))
