"""Checks of training on 8 and more ranks of one machine, four on each made-up node: of its numbers
and bits, not of its time.
"""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends.gloo import GlooCommunicator
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.loops.replicas import Replicas
from tests.checks.topology import WORLD, opened

NODES = [rank // 4 for rank in range(WORLD.size)]
ROWS, STEPS = 3, 4  # rows of a rank


def train(algorithm, comm):
    """The parameters after a training on this rank's rows, or on those of all ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5)).double()
    optimizer = AdamW(net.parameters(), lr=0.01)
    replicas = Replicas(net, [optimizer], algorithm, comm, warn=pytest.fail)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(WORLD.size * ROWS, 8, dtype=torch.float64, generator=generator)
        if comm is not None:
            rows = rows[WORLD.rank * ROWS : (WORLD.rank + 1) * ROWS]
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()
    replicas.remove()
    return [param.detach().clone() for param in net.parameters()]


def equals_one_process(algorithm, comm):
    trained = train(algorithm, comm)
    for param, expected in zip(trained, train(Algorithm(), None), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-11, atol=1e-13)
    bits = b"".join(param.numpy().tobytes() for param in trained)
    assert len(set(WORLD.allgather(bits))) == 1


def check_averages_over_nodes_are_those_of_one_process():
    with opened(NODES) as comm:
        assert isinstance(comm, HierarchicalCommunicator)
        total = torch.arange(300_001).remainder(1000).float() * (comm.rank + 1)
        comm.all_reduce_(total).wait()
        ranks = WORLD.size * (WORLD.size + 1) // 2
        assert torch.equal(total, torch.arange(300_001).remainder(1000).float() * ranks)
        equals_one_process(Averaging(bucket_cap_mb=0.001), comm)


def check_shards_over_nodes_are_stepped_as_in_one_process():
    with opened(NODES) as comm:
        equals_one_process(Sharded(bucket_cap_mb=0.001), comm)


def check_shards_on_one_flat_ring_are_stepped_as_in_one_process():
    with opened(NODES, topology="flat") as comm:
        assert isinstance(comm, GlooCommunicator)
        equals_one_process(Sharded(bucket_cap_mb=0.001), comm)
