"""A compressor's state goes through a checkpoint, and every rank goes on with the same bits."""

import io
from functools import partial

import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.gradients.compression import Int8
from tests.checks.compression.ways import WAYS, assert_same_bits, gradients, make, send
from tests.checks.world import communicator


def through_a_broadcast(state):
    return communicator().broadcast_object(state)


def through_a_file(state):
    """Rank 0's, which alone is complete."""
    file = io.BytesIO()
    torch.save(communicator().broadcast_object(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_every_compressor_goes_on_with_the_same_bits_on_every_rank():
    for way in WAYS:
        goes_on(way, through_a_broadcast, before_the_first_gradient=True)
        goes_on(way, through_a_file, before_the_first_gradient=True)
        goes_on(way, through_a_file, before_the_first_gradient=False)


def goes_on(way, travels, *, before_the_first_gradient):
    comm = communicator()
    whole, loaded = WAYS[way](), WAYS[way]()
    reducer, params = make(whole)
    again, others = make(loaded)
    sends = partial(send, reducer, params)
    for step in range(3):
        sends(gradients(comm.rank, step))
    state = travels(whole.state_dict(comm))
    if not before_the_first_gradient:
        send(again, others, gradients(comm.rank, 7))
    loaded.load_state_dict(state, comm.rank, comm.world_size)
    for step in range(3, 6):
        expected = sends(gradients(comm.rank, step))
        found = send(again, others, gradients(comm.rank, step))
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (
                way,
                travels.__name__,
                before_the_first_gradient,
            )
        assert_same_bits(*found)


def check_gradients_that_arrive_in_another_order_than_registrations_go_on_with_the_same_bits():
    """A bucket's gradients are rounded together, and a training that goes on has yet to see
    their order.
    """
    comm = communicator()
    straight, resumed = (Averaging(compression=Int8(min_numel=0)) for _ in range(2))
    net, other = three_layers(), three_layers()
    straight.attach(net, [], comm)
    for step in range(2):
        averages_of(straight, net, step)
    resumed.attach(other, [], comm)
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    for step in range(2, 4):
        assert all(
            map(torch.equal, averages_of(resumed, other, step), averages_of(straight, net, step))
        )
    for algorithm in (straight, resumed):
        algorithm.detach()
        assert algorithm.state_dict()["buckets"]["names"] == [["0.weight", "2.weight", "1.weight"]]


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(9, 9, bias=False) for _ in range(3)])


def averages_of(algorithm, net, step):
    net.zero_grad()
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + communicator().rank))
    with algorithm.backward():
        net[0](net[2](net[1](x))).square().sum().backward()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None]
