"""What a step takes back that is done again: weights of manual optimization, and a loss scaler's
marks.
"""

from types import SimpleNamespace

import torch
from torch.nn import Parameter

from lightning_ring.integrations.lightning.elastic.undo import (
    already_unscaled,
    forget_unscaling,
)


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
