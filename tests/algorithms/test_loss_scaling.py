"""A loss scaler among thread-ranks: an infinite gradient on one rank skips the step on all."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import PowerSGD
from tests.thread_ranks import run_ranks

INFINITE_AT = 2  # step, counted from 0
WAYS = [
    *itertools.product(("ring", "ring_sharded"), (None, "fp16", "bf16"), (False,)),
    ("ring", "powersgd", False),
    ("ring_sharded", None, True),
]


def algorithm_of(strategy, compression):
    chosen = PowerSGD(rank=1, start_iter=0) if compression == "powersgd" else compression
    made = Sharded if strategy == "ring_sharded" else Averaging
    return made(bucket_cap_mb=0.0005, compression=chosen)


def train(comm, net, strategy, compression, layer, fused, device="cpu"):
    """Returns for each step the scale after it, and the parameters. On rank 1 the gradient of
    ``layer`` becomes inf.
    """
    net = copy.deepcopy(net).to(device)
    if fused:  # unscales, and skips, in its own step
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    algorithm = algorithm_of(strategy, compression)
    algorithm.attach(net, [optimizer], comm)
    scaler = torch.amp.GradScaler(device, init_scale=16.0, growth_interval=100)
    steps = []
    for step in range(5):
        algorithm.begin_batch()
        with algorithm.forward():
            loss = net(torch.ones(4, 16, device=device) * (step + comm.rank)).square().mean()
        optimizer.zero_grad()
        if step == INFINITE_AT and comm.rank == 1:
            handle = net[layer].bias.register_hook(lambda grad: grad * torch.inf)
        with algorithm.backward():
            scaler.scale(loss).backward()
        if step == INFINITE_AT and comm.rank == 1:
            handle.remove()
        algorithm.before_step(optimizer, has_closure=False)
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        algorithm.after_step(optimizer)
        algorithm.wait_parameters()
        steps.append(
            (
                scaler.get_scale(),
                torch.cat([param.detach().flatten().clone() for param in net.parameters()]),
            )
        )
    algorithm.detach()
    return steps


def check(ranks, *way):
    """``ranks`` runs a function on three thread-ranks."""
    torch.manual_seed(0)  # here: threads share torch's generator
    net = nn.Sequential(
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )
    ranks = ranks(3, lambda comm: train(comm, net, *way))
    for steps in ranks:
        assert [scale for scale, _ in steps] == [16, 16, 8, 8, 8]
        for number, ((_, before), (_, after)) in enumerate(itertools.pairwise(steps), 1):
            assert torch.equal(before, after) == (number == INFINITE_AT)
            assert after.isfinite().all()
        assert all(
            torch.equal(one[1], other[1]) for one, other in zip(steps, ranks[0], strict=True)
        )


@pytest.mark.parametrize("layer", [0, 4])  # of different ranks' shards
@pytest.mark.parametrize(("strategy", "compression", "fused"), WAYS)
def test_an_infinity_on_one_rank_skips_the_step_on_all(strategy, compression, fused, layer):
    check(run_ranks, strategy, compression, layer, fused)
