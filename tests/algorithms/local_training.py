"""Training of a small network on ranks that are threads, for the tests of algorithms that step
alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, AdamW, Optimizer

from lightning_ring.algorithms.local import LocalSGD
from tests.thread_ranks import run_ranks

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: SGD(net.parameters(), 0.05, momentum=0.9),
    "adamw": lambda net: AdamW(net.parameters(), 0.01),
}
NUM_STEPS = 11
_SEEDING = threading.Lock()  # ranks that are threads share torch's generator


def network() -> nn.Module:
    with _SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return (net(inputs) - 0.5).square().mean()


def one_step(net: nn.Module, optimizer: Optimizer, algorithm: LocalSGD, rank: int) -> None:
    algorithm.begin_batch()
    with algorithm.forward():
        value = loss(net, rank, algorithm.num_steps)
    with algorithm.backward():
        value.backward()
    algorithm.before_step(optimizer, has_closure=False)
    optimizer.step()
    algorithm.after_step(optimizer)
    optimizer.zero_grad()


def trained(
    world_size: int, algorithm: LocalSGD, optimizer: str, num_steps: int = NUM_STEPS
) -> list[list[Tensor]]:
    """Each rank's parameters after each step."""
    start = network()

    def rank(comm: Any) -> list[Tensor]:
        net, own = copy.deepcopy(start), copy.deepcopy(algorithm)
        steps = OPTIMIZERS[optimizer](net)
        own.attach(net, [steps], comm)
        found = []
        for _ in range(num_steps):
            one_step(net, steps, own, comm.rank)
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        own.detach()
        return found

    return run_ranks(world_size, rank)
