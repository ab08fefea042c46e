"""State dicts and pickles that LARS and LAMB refuse: of other optimizers, or out of range."""

import copy
import pickle

import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.test_bad_input import OUT_OF_RANGE
from tests.optim.ways import every_optimizer, random_params, take_steps

PLAIN_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.1, "nesterov": False}


@pytest.mark.parametrize("cls", [LAMB, LARS])
@pytest.mark.parametrize(
    "group", [torch.optim.AdamW(random_params()).state_dict()["param_groups"][0], PLAIN_SGD]
)
def test_the_state_of_another_optimizer_is_refused(cls, group):
    params = random_params()
    optimizer = cls(params)
    take_steps(optimizer, params, 0, 1)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"] = [group | {"params": list(range(len(params)))}]
    with pytest.raises(ValueError, match="it is of another optimizer"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [bad for bad in OUT_OF_RANGE if bad[1] != "max_grad_norm"] + [(LAMB, "trust_clip", False)],
)
def test_arguments_out_of_range_in_a_state_dict_or_a_pickle(cls, name, value):
    optimizer = cls(random_params())
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=rf"group 0 of it holds {name}.*expected"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][name] = value
    pickled = pickle.dumps(optimizer)
    with pytest.raises(ValueError, match=rf"{name}.*expected"):
        pickle.loads(pickled)


@every_optimizer
def test_keys_that_schedulers_and_scripts_add_stay(optimizer_class):
    optimizer = optimizer_class(random_params())
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"max_lr": 0.2, "lr_scale": 0.5}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5
