"""One parameter server by itself: delay compensation, averages, parts of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_ring.algorithms.server.layout import layouts, write_
from lightning_ring.algorithms.server.server import Push, WeightServer, average, settings_of


def server_of(num_workers: int, **how: Any) -> tuple[WeightServer, list[Tensor]]:
    """A server of one parameter, and where a worker's weights go."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    layout = layouts([weight], 1, cut=True)[0]
    server = WeightServer(SGD([weight], 0.1), [weight], layout, num_workers, **how)
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
        delay = server.push(worker, Push([gradient.clone()], SETTINGS), pulled)
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


def test_parameters_are_cut_into_equal_parts_or_spread_whole() -> None:
    params = [
        torch.zeros(3, 5),
        torch.zeros(7),
        torch.zeros(0),
        torch.zeros(2, 2, dtype=torch.float64),
        torch.zeros(1),
    ]
    for num_servers in (1, 2, 3, 5, 40):
        for cut in (True, False):
            parts = layouts(params, num_servers, cut=cut)
            covered = [
                (piece.index, i)
                for part in parts
                for piece in part.pieces
                for i in range(piece.start, piece.stop)
            ]
            assert sorted(covered) == [
                (n, i) for n, param in enumerate(params) for i in range(param.numel())
            ]
            sizes = [
                sum(
                    (piece.stop - piece.start) * params[piece.index].itemsize
                    for piece in part.pieces
                )
                for part in parts
            ]
            if cut:
                assert max(sizes) - min(sizes) <= 16  # where two dtypes meet
    last = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    values = torch.arange(last.numel(), dtype=torch.float32)
    write_(
        [last],
        [
            (piece, piece.of(values))
            for part in layouts([last], 3, cut=True)
            for piece in part.pieces
        ],
    )
    assert torch.equal(last.reshape(-1), values)
