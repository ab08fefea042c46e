"""`lightning_ring.distribute` in plain loops on two ranks, in a single process, and its errors."""

import pytest
import torch
from torch import nn

from lightning_ring import distribute
from lightning_ring.errors import ConfigurationError
from tests.battery import check_names

MODULE = "tests.checks.loops"


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check)


def test_a_single_process_registers_nothing_and_trains_as_before():
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    plain = torch.optim.Adam(reference.parameters())
    with distribute(model, optimizer, algorithm="ring_sharded") as training:
        assert (training.rank, training.world_size, training.communicator) == (0, 1, None)
        hooks = model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_pre_hooks
        assert not any(hooks)
        assert not model.weight._post_accumulate_grad_hooks
        for net, steps in ((model, optimizer), (reference, plain)):
            net(torch.ones(2, 3)).sum().backward()
            steps.step()
        with training.no_sync():
            pass
        assert training.all_reduce(torch.tensor(3)) == 3
        assert list(training.sampler([1, 2, 3], shuffle=False)) == [0, 1, 2]
        assert training.optimizer_state_dict(optimizer)["state"].keys() == {0, 1}
    assert torch.equal(model.weight, reference.weight)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"algorithm": "gossip"},
            "algorithm='gossip', expected one of None, 'ring', 'ring_sh",
        ),
        ({"backend": "smoke"}, "distribute got backend='smoke'"),
        ({"ranks": 0}, "ranks=0, expected a number of ranks, 1 or more"),
        ({"broadcast_buffers": "step"}, "broadcast_buffers='step', expected one of True, False"),
        ({"optimizers": ["Adam"]}, "distribute got a str among its optimizers"),
        ({"module": "resnet"}, "distribute got a str as module, expected a torch.nn.Module"),
    ],
)
def test_bad_arguments_get_one_clear_error(arguments, expected):
    with pytest.raises(ConfigurationError, match=expected):
        distribute(**({"module": nn.Linear(1, 1)} | arguments))
