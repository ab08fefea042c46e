"""Whose gradients travel: unused, frozen, shared and mixed parameters, and the buckets they lie
in.
"""

import copy

import torch
from torch import nn

from lightning_ring.gradients.reducer import Reducer
from tests.checks.gradients.nets import (
    assert_same,
    batches,
    fresh_gradients,
    make,
    mine,
    reference_mean,
)
from tests.checks.world import communicator


def check_earlier_average_of_unused_parameters_stays():
    net, reference, reducer, _, _ = make()
    # no zero_grad between: gradients of 0 to 3 must survive the others
    for path in ((0, 1, 2, 3), (4, 5), (4, 5)):
        xs = batches()
        with reducer.backward():
            net(mine(xs), path).backward()
        reference_mean(reference, xs, path)
        assert_same(net, reference)


def check_mixed_dtypes_and_layouts():
    torch.manual_seed(0)
    net = nn.ModuleList(
        [
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.Linear(4, 4, dtype=torch.float64),
            nn.Linear(4, 2),
        ]
    )
    scalar = nn.Parameter(torch.tensor(2.0))
    net.register_parameter("scalar", scalar)
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    reference = copy.deepcopy(net)

    def loss(module, x):
        hidden = module[0](x).mean((2, 3))
        return (
            module[2](module[1](hidden.double()).float()) * module.scalar
        ).sum() + module.empty.sum()

    reducer = Reducer(communicator(), net.named_parameters())
    rank, size = communicator().rank, communicator().world_size
    xs = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for _ in range(2):
        with fresh_gradients(net, reference), reducer.backward():
            loss(net, xs[rank]).backward()
        (sum(loss(reference, x) for x in xs) / size).backward()
        assert_same(net, reference, rtol=1e-5)
        assert net[0].weight.grad.stride() == net[0].weight.stride()


def check_order_of_use_replaces_order_of_registration():
    net, reference, reducer, comm, _ = make()
    # used in the reverse of registration: before the rebuild nothing can leave early
    path = (5, 4, 3, 2, 1, 0)
    for step in range(2):
        comm.produced.clear()
        comm.produced_when_sent.clear()
        xs = batches(step)
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs), path).backward()
        reference_mean(reference, xs, path)
        assert_same(net, reference)
    assert comm.produced_when_sent[0] < 6, comm.produced_when_sent
    assert reducer.buckets[0].names[0].startswith("layers.0"), reducer.buckets[0].names
