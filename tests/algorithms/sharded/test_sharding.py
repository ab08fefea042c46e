"""Sharded steps among thread-ranks, against one process that steps whole parameters on all
ranks' batches.
"""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_ring.algorithms.sharded import Sharded, reads
from lightning_ring.optim import LAMB
from tests.refusals import refused
from tests.thread_ranks import run_ranks

STEPS = 4
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "lamb": lambda params: LAMB(params, lr=0.01, max_grad_norm=0.1, foreach=True),
}
OTHERS = (ASGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


class Net(nn.Module):
    """Channels-last, scalar, empty and unused parameters, in two dtypes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.unused = nn.Linear(3, 3).double()
        self.sometimes = nn.Linear(3, 3).double()
        self.last = nn.Linear(3, 2).double()
        self.single = nn.Linear(3, 2)

    def forward(self, x, step):
        x = self.conv(x).mean((2, 3)) * self.scale
        if step == 1:
            x = self.sometimes(x)
        # the float32 part has no influence on the gradients of the others
        return (
            self.last(x).square().mean()
            + self.single(x.detach().float()).square().mean()
            + self.empty.sum()
        )

    def precise(self):
        return [param for param in self.parameters() if param.dtype == torch.float64]


def batches(step, size):
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(24, 2, 3, 3, dtype=torch.float64, generator=generator).chunk(size))


def start():
    torch.manual_seed(0)
    return Net()


def attached(comm, net, optimizer, **settings):
    algorithm = Sharded(**settings)
    algorithm.attach(net, [optimizer], comm, warn=pytest.fail)
    return algorithm


def train(comm, net, make, steps, state=None):
    """Train ``net`` in place; returns the optimizer's state dict (rank 0)."""
    optimizer = make(net.parameters())
    sharding = attached(comm, net, optimizer, bucket_cap_mb=0.0001)
    sharding.overlaps = True
    if state is not None:
        sharding.of(optimizer).load_state_dict(state)
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        # two backwards into one step: the first stays local, but for the last step's
        for micro in range(2):
            with sharding.forward(wait=True):
                loss = net(batches(2 * step + micro, comm.world_size)[comm.rank], step)
            with (
                nullcontext() if micro == 1 or step == steps[-1] else sharding.backwards.no_sync(),
                sharding.backward(),
            ):
                loss.backward()
        sharding.clip_grad_norm_(net.precise(), 0.2)
        optimizer.step()
    result = sharding.of(optimizer).state_dict(is_rank_zero=comm.rank == 0)
    sharding.detach()
    return result


def train_whole(net, make, steps):
    optimizer = make(net.parameters())
    for step in steps:
        optimizer.zero_grad()
        for micro in range(2):
            net(torch.cat(batches(2 * step + micro, 1)), step).backward()
        nn.utils.clip_grad_norm_(net.precise(), 0.2)
        optimizer.step()
    return optimizer.state_dict()


def assert_close(nets, reference, make):
    for (name, expected), *params in zip(
        reference.named_parameters(), *(net.parameters() for net in nets), strict=True
    ):
        # it clips by the norm of all
        precise = expected.dtype == torch.float64 and make is not OPTIMIZERS["lamb"]
        tolerance = 1e-12 if precise else 2e-6
        for param in params:
            torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(param, params[0]), f"{name}: ranks hold different bits"
            assert param.stride() == expected.stride()


@pytest.mark.parametrize(
    ("make", "world_size"),
    [
        (OPTIMIZERS["sgd"], 1),
        (OPTIMIZERS["sgd"], 8),
        *((make, 3) for make in (*OPTIMIZERS.values(), *OTHERS)),
    ],
)
def test_equals_whole_optimizers_in_one_process(make, world_size):
    nets = [start() for _ in range(world_size)]
    states = run_ranks(world_size, lambda comm: train(comm, nets[comm.rank], make, range(STEPS)))
    reference = start()
    expected = train_whole(reference, make, range(STEPS))
    assert_close(nets, reference, make)
    assert not any(states[1:])
    assert states[0]["param_groups"] == expected["param_groups"]
    assert states[0]["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(states[0]["state"][index][key], value, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "make", [OPTIMIZERS["sgd"], AdamW, OPTIMIZERS["lamb"]], ids=["sgd", "adamw", "lamb"]
)
def test_goes_on_at_another_world_size(make):
    reference = start()
    train_whole(reference, make, range(STEPS))
    net, state = start(), None
    for step, world_size in enumerate((2, 3, 1, 2)):
        nets = [copy.deepcopy(net) for _ in range(world_size)]
        steps = range(step, step + 1)
        before = state
        state = run_ranks(
            world_size,
            lambda comm: train(comm, nets[comm.rank], make, steps, copy.deepcopy(before)),  # noqa: B023
        )[0]
        net = nets[0]
    assert_close([net], reference, make)


def test_each_rank_holds_its_share_of_the_state():
    def share(comm):
        net = nets[comm.rank]
        optimizer = AdamW(net.parameters())
        sharding = attached(comm, net, optimizer)
        for _ in range(2):
            with sharding.backward():
                net(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            assert sharding.of(optimizer).optimizer.param_groups[0]["params"] == list(
                net.parameters()
            )
        with sharding.states_shown():
            return sum(
                value.numel()
                for state in optimizer.state.values()
                for value in state.values()
                if value.dim()
            )

    nets = [nn.Linear(1000, 100) for _ in range(3)]
    whole = 2 * sum(param.numel() for param in nets[0].parameters())
    for elements in run_ranks(3, share):
        assert elements == pytest.approx(whole / 3, rel=0.01)


def test_an_optimizer_that_holds_parts_of_an_earlier_fit_is_refused():
    def fit_twice(comm):
        net = nn.Linear(3, 3)
        optimizer = AdamW(net.parameters())
        for _ in range(2):
            sharding = attached(comm, net, optimizer)
            with sharding.backward():
                net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            sharding.detach()
            with sharding.states_shown():  # as Lightning's teardown needs it
                pass

    with refused(r"earlier training.*configure_optimizers"):
        run_ranks(1, fit_twice)


def test_what_a_probing_run_did_can_be_undone():
    """As a callback does it that trains for a while to measure, and then puts everything back."""
    reference = start()
    train_whole(reference, AdamW, range(STEPS))
    first = [start() for _ in range(2)]
    half = run_ranks(2, lambda comm: train(comm, first[comm.rank], AdamW, range(2)))[0]

    def probe_and_train(comm):
        net = first[comm.rank]
        optimizer = AdamW(net.parameters())
        sharding = attached(comm, net, optimizer)
        sharding.of(optimizer).load_state_dict(copy.deepcopy(half))
        before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
        for steps in (range(3, 5), range(2, STEPS)):
            for step in steps:
                optimizer.zero_grad()
                for micro in range(2):
                    with sharding.backward():
                        net(batches(2 * step + micro, 2)[comm.rank], step).backward()
                sharding.clip_grad_norm_(net.precise(), 0.2)
                optimizer.step()
            if steps.start == 3:
                net.load_state_dict(weights)
                optimizer.load_state_dict(before)
        with refused("save_checkpoint"):
            optimizer.state_dict()

    run_ranks(2, probe_and_train)
    assert_close(first, reference, AdamW)


def test_a_graph_from_before_a_step_is_an_error():
    """As with whole parameters: the values that it saved are gone, and its gradients would be
    wrong.
    """

    def rank(comm):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = SGD(net.parameters(), lr=0.1)
        sharding = attached(comm, net, optimizer)
        for _ in range(3):
            with sharding.forward(wait=True):
                loss = net(torch.ones(3, 4)).square().mean()
            with sharding.backward():
                loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, net[0].weight)
        sharding.detach()

    run_ranks(2, rank)


@pytest.mark.parametrize("streams", [1, 2])
def test_parameters_read_on_several_streams_are_waited_for(streams, monkeypatch):
    """The stream is the only thing that is not real here: a CPU has none."""
    warnings = []

    def rank(comm):
        current = ["first"]
        monkeypatch.setattr(reads, "current_stream", lambda device: current[0])
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = AdamW(net.parameters())
        sharding = Sharded()
        sharding.attach(net, [optimizer], comm, warn=warnings.append)
        sharding.overlaps = True
        for _ in range(3):
            current[:] = ["first"]
            with sharding.forward(wait=True):
                x = net[0](torch.ones(1, 3))
                if streams == 2:
                    current[:] = ["second"]
                x = net[1](x)
            with sharding.backward():
                x.sum().backward()
            optimizer.step()
        trusted = sharding._reads.trusted
        sharding.detach()
        return trusted

    assert run_ranks(1, rank) == [streams == 1]
    assert ["several streams" in warning for warning in warnings] == [True] * (streams - 1)


def test_a_thread_that_waits_takes_no_later_all_gather_for_its_own():
    waits, goes_on, seen = threading.Event(), threading.Event(), []

    class Earlier:
        def wait(self):
            waits.set()
            assert goes_on.wait(20)

    class Later:
        def wait(self):
            seen.append(bucket.hidden)

    def step(comm):
        net = nn.Linear(3, 3)
        optimizer = SGD(net.parameters(), lr=0.1)
        sharding = attached(comm, net, optimizer)
        with sharding.backward():
            net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return sharding

    sharding = run_ranks(1, step)[0]
    parameters = sharding._parameters
    (bucket,) = parameters.buckets
    bucket.hide()
    parameters._gathers[bucket] = Earlier()
    thread = threading.Thread(target=parameters.wait, daemon=True)
    thread.start()
    assert waits.wait(20)
    # meanwhile the training's thread has waited too, and stepped again
    parameters._gathers[bucket] = Later()
    goes_on.set()
    thread.join(20)
    assert seen == [True]
    assert not bucket.hidden
    sharding.detach()
