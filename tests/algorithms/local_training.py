"""Training of a small network on ranks that are threads, for the tests of algorithms that step
alone.
"""

import copy
import threading

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, AdamW

from tests.thread_ranks import run_ranks

OPTIMIZERS = {
    "sgd": lambda net: SGD(net.parameters(), 0.05, momentum=0.9),
    "adamw": lambda net: AdamW(net.parameters(), 0.01),
}
NUM_STEPS = 11
_SEEDING = threading.Lock()  # ranks that are threads share torch's generator


def network():
    with _SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(net, rank, step):
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return (net(inputs) - 0.5).square().mean()


def one_step(net, optimizer, algorithm, rank):
    algorithm.begin_batch()
    with algorithm.forward():
        value = loss(net, rank, algorithm.num_steps)
    with algorithm.backward():
        value.backward()
    algorithm.before_step(optimizer, has_closure=False)
    optimizer.step()
    algorithm.after_step(optimizer)
    optimizer.zero_grad()


def trained(world_size, algorithm, optimizer, num_steps=NUM_STEPS):
    """Each rank's parameters after each step."""
    start = network()

    def rank(comm):
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
