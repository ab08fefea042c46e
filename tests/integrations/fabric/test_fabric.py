"""``Fabric(strategy="ring")``: loops on two ranks, arguments, and the recipe under plain
``python``.
"""

import re
from datetime import timedelta

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_ring import RingFabricStrategy
from lightning_ring.errors import ConfigurationError
from tests import forked
from tests.battery import check_names
from tests.processes import ROOT, run

MODULE = "tests.checks.fabric"
RECIPE = str(ROOT / "recipes" / "fabric_digits.py")


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check)


@pytest.mark.ranks
def test_the_recipe_starts_its_own_ranks_and_learns(tmp_path):
    words = ["--devices", "2", "--strategy", "ring_sharded", "--epochs", "3", "--logs"]
    command = [*forked.python(), RECIPE, *words, str(tmp_path)]
    done = run(command, CUDA_VISIBLE_DEVICES="", **forked.ranks())
    assert done.returncode == 0, done.stdout
    (accuracy,) = re.findall(r"test accuracy (\S+)", done.stdout)
    assert float(accuracy) > 0.9
    assert (tmp_path / "fabric_digits.ckpt").exists()


def test_a_single_process_trains_with_no_hook_and_no_communicator():
    fabric = Fabric(accelerator="cpu", strategy="ring_sharded", devices=1)
    fabric.launch()
    net = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.clone()
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(1, 2)).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    assert not torch.equal(net.weight, before)
    assert not net._forward_pre_hooks
    assert not net.weight._post_accumulate_grad_hooks
    assert isinstance(fabric.strategy, RingFabricStrategy)
    assert fabric.strategy.communicator is None
    assert fabric.all_gather(torch.ones(2)).shape == (1, 2)
    assert fabric.broadcast("text") == "text"
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def test_both_names_are_registered_and_take_the_algorithm():
    for name, sharded in (("ring", False), ("ring_sharded", True)):
        assert name in STRATEGY_REGISTRY.available_strategies()
        strategy = Fabric(accelerator="cpu", strategy=name).strategy
        assert isinstance(strategy, RingFabricStrategy)
        assert strategy.options.new_algorithm().sharded is sharded


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "smoke"}, "RingFabricStrategy got backend='smoke', expected one of 'auto'"),
        ({"timeout": timedelta(0)}, "RingFabricStrategy got timeout"),
        ({"broadcast_buffers": "epoch"}, "broadcast_buffers='epoch', expected one of True, False"),
    ],
)
def test_bad_arguments_get_one_clear_error(arguments, expected):
    with pytest.raises(ConfigurationError, match=expected):
        RingFabricStrategy(**arguments)
