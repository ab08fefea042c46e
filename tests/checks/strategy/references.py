"""What `RingStrategy` is compared with: Lightning's DDP, and one process on the whole batch."""

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_ring import RingStrategy
from tests.checks.models import (
    SIZE,
    assert_all_ranks_equal,
    ddp,
    fit,
    parameters,
    relative_difference,
)


def both(make, train=None, val=None, *, strategies=(), **kwargs):
    """``make()`` trained under the ring and under Lightning's DDP, or two others, from one seed."""
    modules = []
    for strategy in strategies or (RingStrategy(bucket_cap_mb=0.0005), ddp()):
        L.seed_everything(7, verbose=False)
        module = make()
        made = {key: kwargs[key]() for key in ("plugins", "callbacks") if key in kwargs}
        fit(strategy, module, train, val, **kwargs | made)
        modules.append(module)
    return modules


def assert_like_ddp(ring, reference, tolerance=1e-5):
    """Bit for bit on two ranks; with more the order of additions differs."""
    assert_all_ranks_equal(parameters(ring))
    difference = relative_difference(parameters(ring), parameters(reference))
    assert difference == 0 if SIZE <= 2 else difference < tolerance, difference


def one_process(module, batches, *, lr, momentum):
    """Train ``module`` on the concatenation of all ranks' batches, in a plain loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    for batch in batches:
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()


def scaler_plugin(init_scale=2.0**24):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)
