"""A backward that raises an exception, which the loop catches on all ranks, leaves nothing in
the next one.
"""

import itertools
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ring.errors import CollectiveError, RingError
from lightning_ring.gradients.compression import DGC, OneBit, TopK
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


class _Failing(torch.autograd.Function):
    planted = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _fail_if_planted(grad)
        return grad


def _fail_if_planted(_):
    if _Failing.planted:
        raise ValueError("planted")


def _plant(net, where, index):
    """In the backward of the layer ``index``, once `_Failing` is ``planted``."""
    if where == "function":
        net.layers[index].register_forward_hook(lambda _, __, output: _Failing.apply(output))
    elif where == "hook":
        net.layers[index].weight.register_hook(_fail_if_planted)
    else:
        net.layers[index].weight.register_post_accumulate_grad_hook(_fail_if_planted)


@contextmanager
def _planted():
    _Failing.planted = True
    try:
        with pytest.raises(ValueError, match="planted"):
            yield
    finally:
        _Failing.planted = False


def check_backward_that_raises_leaves_nothing_behind():
    """Plain or not, wherever it raises, also if all that was produced is sent, and within a
    reentrant checkpoint.
    """
    cases = itertools.product(
        (True, False), (None, True), ("function", "hook", "post-accumulate hook"), (5, 3, 0)
    )
    for plain, reentrant, where, index in cases:
        net, reference, reducer, comm, warnings = make(reentrant=reentrant)
        _plant(net, where, index)
        around = nullcontext if plain else reducer.backward
        with reducer.plain_backwards(reduced=plain):
            for step in range(5):
                xs = batches(step)
                comm.sent.clear()
                with fresh_gradients(net, reference, set_to_none=step % 2 == 0):
                    pass
                if step in (0, 2):
                    with _planted(), around():
                        net(mine(xs)).backward()
                    continue
                with around():
                    net(mine(xs)).backward()
                reference_mean(reference, xs)
                assert_same(net, reference)
                assert len(comm.sent) == len(reducer.buckets)
        assert not warnings


def check_backward_after_one_that_raised_asks_for_zero_grad():
    net, _, reducer, _, _ = make()
    _plant(net, "hook", 0)
    expected = "a backward raised an exception before it had averaged the gradient of"
    with reducer.plain_backwards(reduced=True):
        net(mine(batches())).backward()
        net.zero_grad()
        with reducer.no_sync():
            net(mine(batches())).backward()
        with _planted():
            net(mine(batches())).backward()
        with pytest.raises(RingError, match=expected):
            reducer.check_reduced(net.parameters())
        with reducer.no_sync():
            net(mine(batches())).backward()
        with pytest.raises(RingError, match=expected):
            net(mine(batches())).backward()
        net.zero_grad()
        reducer.check_reduced(net.parameters())
        net(mine(batches())).backward()


def check_what_compressors_kept_of_a_backward_that_raised_is_forgotten():
    comm = communicator()
    for build in (
        partial(TopK, 0.25, 0),
        partial(DGC, 0.25, warmup_steps=0, min_numel=0),
        partial(OneBit, 0),
    ):
        averages = []
        for raises in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
            net[0].weight.register_hook(_fail_if_planted)
            reducer = Reducer(
                comm, net.named_parameters(), bucket_cap_mb=0.0002, compressor=build()
            )
            with reducer.plain_backwards(reduced=True):
                if raises:
                    _backward(net, 0)
                    with _planted():
                        _backward(net, 1)
                _backward(net, 2)
            averages.append([param.grad for param in net.parameters()])
        assert all(map(torch.equal, *averages))


def _backward(net, step):
    net.zero_grad()
    net(batches(step)[communicator().rank].float()).square().sum().backward()


def check_ranks_that_differ_in_an_exception_get_an_error():
    for backend in ("gloo", "mpi", "shared memory") if WORLD.size > 1 else ():
        net, _, _, _, _ = make()
        _plant(net, "hook", 0)
        with opened(backend) as comm:
            reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=0.0006)
            expected = r"backward 2 \(step 0.*, after 1 that raised\)"
            with raised_by_all(CollectiveError, expected):
                _train(net, reducer, raises=comm.rank == 0)
            reducer.remove()


def _train(net, reducer, *, raises):
    with reducer.plain_backwards(reduced=True):
        for step in range(4):
            net.zero_grad()
            with _planted() if raises and step == 1 else nullcontext():
                net(mine(batches(step))).backward()
