"""What a step takes back that is done again: weights of manual optimization, and a loss scaler's
marks.
"""

from types import SimpleNamespace

import torch
from torch.nn import Parameter

from lightning_ring.integrations.lightning.elastic.undo import (
    already_unscaled,
    forget_unscaling,
    remember_weights,
)


def test_schedulers_and_frozen_parameters_are_as_before_the_step():
    """Weights and optimizers are compared by `test_fit.py`."""
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    strategy = SimpleNamespace(fit_model=module, optimizers=[optimizer])
    strategy.lr_scheduler_configs = [SimpleNamespace(scheduler=scheduler)]
    restore = remember_weights(strategy)
    optimizer.step()
    scheduler.step()
    module.weight.requires_grad_(False)
    restore()
    assert module.weight.requires_grad
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_a_scaler_divides_the_averages_of_a_step_once():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    precision = SimpleNamespace(scaler=scaler)
    param = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)

    def average():
        param.grad = None
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
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
