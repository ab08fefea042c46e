"""A backward that is not the training's stays local, and hooks of the user see gradients before
they leave.
"""

import torch
from torch import nn

from lightning_ring.errors import CollectiveError
from lightning_ring.gradients.reducer import Reducer
from tests.checks.comm import WORLD, opened
from tests.checks.gradients.nets import (
    assert_same,
    batches,
    fresh_gradients,
    make,
    mine,
    reference_mean,
)
from tests.checks.world import communicator, raised_by_all


def check_local_backward_on_one_rank_sends_nothing():
    net, reference, reducer, comm, _ = make()
    for step in range(3):
        comm.sent.clear()
        with fresh_gradients(net, reference):
            x = mine(batches(100 + step))
        if communicator().rank == 0:
            net(x).backward()
            reference(x).backward()
            for param, own in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(param.grad, own.grad)
            torch.autograd.grad(net(x), list(net.parameters()))
        assert not comm.sent
        xs = batches(step)
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs)).backward()
        reference_mean(reference, xs)
        assert_same(net, reference)


def check_another_backward_or_step_is_an_error_on_every_rank():
    for backend in (
        ("gloo", "mpi", "shared memory") + ("hierarchical",) * (WORLD.size == 4)
        if WORLD.size > 1
        else ()
    ):
        for numel in (2, 20_000):  # short and long collectives go different ways
            torch.manual_seed(0)
            net = nn.Linear(numel, 1)
            with opened(backend) as comm:
                reducer = Reducer(comm, net.named_parameters())
                expected = (
                    r'"backward 3 \(step 1\): bucket 0 \(.*"backward 3 \(step 0\): bucket 0 \('
                )
                with raised_by_all(CollectiveError, expected):
                    _train(reducer, net, extra_step=comm.rank == 0)
                reducer.remove()


def _train(reducer, net, *, extra_step):
    for step in range(4):
        reducer.num_steps = int(extra_step and step == 2)
        with reducer.backward():
            net(torch.ones(2, net.in_features)).sum().backward()
