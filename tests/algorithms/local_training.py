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


def vector(net):
    return parameters_to_vector(net.parameters()).detach().clone()


def begin(algorithm, comm, optimizer="sgd", **said):
    """A network and its optimizer, which ``algorithm`` is attached to."""
    net = network()
    steps = OPTIMIZERS[optimizer](net)
    algorithm.attach(net, [steps], comm, **said)
    return net, steps


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


def trained(world_size, algorithm, optimizer):
    """Each rank's parameters after each step."""

    def rank(comm):
        own, found = copy.deepcopy(algorithm), []
        net, steps = begin(own, comm, optimizer)
        for _ in range(NUM_STEPS):
            one_step(net, steps, own, comm.rank)
            found.append(vector(net))
        own.detach()
        return found

    return run_ranks(world_size, rank)
