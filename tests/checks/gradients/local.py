"""A backward that is not the training's stays local, and hooks of the user see gradients before
they leave.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import Parameter

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
from tests.checks.world import communicator

SOME = (0, 1, 2, 3)


def check_local_backward_on_one_rank_sends_nothing() -> None:
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
        reference_mean(reference, lambda x, _: reference(x), xs)
        assert_same(net, reference)


def check_local_gradients_travel_with_the_next_backward() -> None:
    """As under DistributedDataParallel, also those of layers that the next backward does not
    reach.
    """
    net, reference, reducer, _, _ = make()
    for step in range(3):
        with fresh_gradients(net, reference):
            inner, xs = batches(100 + step), batches(step)
        if step != 1 or communicator().rank == 0:
            net(mine(inner)).backward()
        reference_mean(reference, lambda x, rank: reference(x) * (step != 1 or rank == 0), inner)  # noqa: B023
        with reducer.backward():
            net(mine(xs), SOME).backward()
        reference_mean(reference, lambda x, _: reference(x, SOME), xs)
        assert_same(net, reference)


def check_another_backward_or_step_is_an_error_on_every_rank() -> None:
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
                with pytest.raises(CollectiveError, match=expected) as caught:
                    _train(reducer, net, extra_step=comm.rank == 0)
                assert len(set(WORLD.allgather(str(caught.value)))) == 1
                reducer.remove()


def _train(reducer: Reducer, net: nn.Linear, *, extra_step: bool) -> None:
    for step in range(4):
        reducer.num_steps = int(extra_step and step == 2)
        with reducer.backward():
            net(torch.ones(2, net.in_features)).sum().backward()


def check_hooks_of_the_user_change_what_travels() -> None:
    net, reference, reducer, comm, _ = make()
    scale = float(1 + communicator().rank)
    seen: list[bool] = []

    def rescale(param: Parameter) -> None:
        seen.append(param.grad is not None)
        param.grad.mul_(scale)

    for step in range(4):
        if step == 1:
            for param in net.layers[5].parameters():
                param.register_post_accumulate_grad_hook(rescale)
        comm.sent.clear()
        comm.produced.clear()
        comm.produced_when_sent.clear()
        xs = batches(step)
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs)).backward()
        reference_mean(reference, lambda x, _: reference(x), xs)
        if step:
            for param in reference.layers[5].parameters():
                grads = [torch.autograd.grad(reference(x), param)[0] for x in xs]
                param.grad = sum((1 + rank) * grad for rank, grad in enumerate(grads)) / len(xs)
        assert_same(net, reference)
    assert len(seen) == 6
    assert all(seen)
    assert comm.produced_when_sent[0] < 12, (
        "from the second backward on buckets leave during backward again"
    )
