"""How often a step makes the host wait for a device, and how many operations it launches; the
device is a fake.
"""

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded, norms
from tests.compressors import COMPRESSORS
from tests.fake_device import on_fake_device
from tests.operations import Operations
from tests.thread_ranks import run_ranks

NUM_LAYERS = 40
WAYS = {
    **{f"ring, {name}": (Averaging, name) for name in COMPRESSORS},
    **{f"ring_sharded, {name}": (Sharded, name) for name in ("none", "fp16")},
}


def make(way, cap=0.002):
    algorithm, compression = WAYS[way]
    return algorithm(bucket_cap_mb=cap, compression=COMPRESSORS[compression]())


def net_of(num_layers=4):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers)


def train(comm, algorithm, now, *, num_steps=5, freeze_at=None):
    """``now`` is the step that the device is in, as far as the host may know."""
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm.attach(net, [optimizer], comm)
    for step in range(num_steps):
        now[comm.rank] = step
        if step == freeze_at:
            net[0].requires_grad_(False)
        algorithm.begin_batch()
        with algorithm.forward():
            loss = net(torch.ones(2, 8) * (comm.rank + 1)).square().mean()
        optimizer.zero_grad()
        with algorithm.backward():
            loss.backward()
        optimizer.step()
        algorithm.wait_parameters()
        algorithm.agreed_to_stop()
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    algorithm.detach()
    return weights


@pytest.mark.parametrize("freeze_at", [None, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_host_waits_for_no_value_of_the_step_it_has_just_sent(monkeypatch, way, freeze_at):
    expected = run_ranks(1, lambda comm: train(comm, make(way), {}, freeze_at=freeze_at))
    now = {}

    def mark():
        step = now[0]
        return lambda: step < now[0]

    on_fake_device(monkeypatch, mark)

    def rank(comm):
        def refuse(reached):
            raise AssertionError("the host waits for the device")

        comm.wait_until = refuse
        return train(comm, make(way), now, freeze_at=freeze_at)

    assert torch.equal(run_ranks(1, rank)[0], expected[0])


def test_clipping_takes_as_many_operations_for_many_parameters_as_for_few():
    def count(num_layers):
        def rank(comm):
            net = net_of(num_layers)
            algorithm = Sharded(bucket_cap_mb=1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            algorithm.attach(net, [optimizer], comm)
            with algorithm.backward():
                net(torch.ones(2, 8)).sum().backward()
            algorithm.clip_grad_norm_(net.parameters(), 0.1)  # builds the buckets of parameters
            own = [algorithm._attached.own_gradient(param) for param in net.parameters()]
            with Operations() as launches:
                norms._total_norm(own, [], algorithm._attached, 2.0)
            algorithm.detach()
            return len(launches.calls)

        return run_ranks(1, rank)[0]

    assert count(NUM_LAYERS) == count(2) < 15


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipping"])
# a factorization a matrix
@pytest.mark.parametrize("way", [way for way in WAYS if way != "ring, powersgd"])
def test_a_step_takes_as_many_further_operations_for_many_parameters_as_for_few(way, clips):
    """Further than one process's step; many parameters lie in as many buckets as few do."""

    def further(num_layers):
        def rank(comm):
            counts = []
            for algorithm in (make(way, 1), Algorithm()):
                net = net_of(num_layers)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
                algorithm.attach(net, [optimizer], comm)
                for _ in range(4):
                    optimizer.zero_grad()
                    with Operations() as launches:
                        with algorithm.forward():
                            loss = net(torch.ones(2, 8)).sum()
                        with algorithm.backward():
                            loss.backward()
                        if clips:
                            algorithm.clip_grad_norm_(net.parameters(), 0.1)
                        optimizer.step()
                        algorithm.wait_parameters()
                counts.append(len(launches.calls))
                algorithm.detach()
            return counts[0] - counts[1]

        return run_ranks(1, rank)[0]

    assert further(NUM_LAYERS) <= further(20)
