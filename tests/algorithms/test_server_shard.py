"""One parameter server by itself: delay compensation, averages, parts of parameters."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_ring.algorithms.server.server import WeightServer, parts_of, settings_of


def server_of(num_workers, **how):
    """A server of one parameter, and where a worker's weights go."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    server = WeightServer(SGD([weight], 0.1), [weight], *parts_of([weight], 1), num_workers, **how)
    return server, [torch.zeros(6, dtype=torch.float64)]


SETTINGS = settings_of(SGD([nn.Parameter(torch.zeros(1))], 0.1))


@pytest.mark.parametrize("compensation", [None, 0.3])
def test_delay_compensation_is_equation_10_of_the_paper(compensation):
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
