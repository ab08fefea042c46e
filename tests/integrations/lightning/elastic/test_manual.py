"""What a step takes back that is done again: weights of manual optimization, and a loss scaler's
marks.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_ring.integrations.lightning.elastic.undo import (
    already_unscaled,
    forget_unscaling,
    remember_weights,
)


def step(module, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def state(module, parts):
    return copy.deepcopy([module.state_dict(), *(part.state_dict() for part in parts)])


@pytest.mark.parametrize("begun", [False, True])  # whether optimizers have state already
def test_weights_optimizers_and_schedulers_are_as_before_the_step(begun):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizers = [
        torch.optim.AdamW(module[0].parameters()),
        torch.optim.SGD(module[1].parameters(), momentum=0.9),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    parts = [*optimizers, scheduler]
    strategy = SimpleNamespace(
        fit_model=module,
        optimizers=optimizers,
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
    )
    if begun:
        step(module, optimizers)
    before = state(module, parts)
    restore = remember_weights(strategy)
    step(module, optimizers)
    scheduler.step()
    module[1].weight.requires_grad_(False)
    once = state(module, parts)
    restore()
    torch.testing.assert_close(state(module, parts), before, rtol=0, atol=0)
    assert all(param.requires_grad for param in module.parameters())
    step(module, optimizers)
    scheduler.step()
    torch.testing.assert_close(state(module, parts), once, rtol=0, atol=0)


def test_a_scaler_divides_the_averages_of_a_step_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = SimpleNamespace(scaler=scaler)
    param = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)

    def average():
        param.grad = None
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        assert param.grad is not None
        return param.grad

    average()
    forget_unscaling(precision)
    assert average() == 1.0  # of the step that is done again
    with already_unscaled(precision):  # as it is finished where others have finished it
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert param.item() == -1.0
    assert average() == 1.0  # of the next step
