"""Parameters sorted at one step and used again at the next: changes between steps are noticed."""

import copy
import weakref
from collections import defaultdict

import pytest
import torch
from torch.nn import Parameter

from tests.optim.ways import assert_equal, every_optimizer

SHAPES = [(4, 3, 2, 2), (5,), (), (6, 2), (3, 4, 2, 2)]


def _momenta(optimizer, factor):
    for state in optimizer.state.values():
        for name in optimizer.state_names:
            state[name] = state[name] * factor


def _load(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _transposed_gradient(params):
    params[3].grad = params[3].grad.t().contiguous().t()


CHANGES = {
    "nothing": lambda optimizer, params: None,
    "a gradient is gone": lambda optimizer, params: setattr(params[1], "grad", None),
    "another gradient is gone": lambda optimizer, params: setattr(params[3], "grad", None),
    "states are replaced": lambda optimizer, params: _momenta(optimizer, 0.5),
    "one state is begun anew": lambda optimizer, params: optimizer.state.pop(params[0], None),
    "all states are begun anew": lambda optimizer, params: setattr(
        optimizer, "state", defaultdict(dict)
    ),
    "a state is loaded": lambda optimizer, params: _load(optimizer),
    "a gradient lies otherwise": lambda optimizer, params: _transposed_gradient(params),
    "a weight lies otherwise": lambda optimizer, params: setattr(
        params[4], "data", params[4].data.to(memory_format=torch.channels_last)
    ),
    "a weight has other memory": lambda optimizer, params: setattr(
        params[2], "data", params[2].data.clone() * 2
    ),
    "gradients are in other memory": lambda optimizer, params: [
        setattr(p, "grad", p.grad.clone()) for p in params
    ],
    "a group comes": lambda optimizer, params: optimizer.add_param_group(
        {"params": [_another(params)]}
    ),
}


def _another(params):
    params.append(Parameter(torch.ones(7)))
    params[-1].grad = torch.full((7,), 0.1)
    return params[-1]


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}], ids=str)
@every_optimizer
def test_steps_equal_those_that_collect_anew(optimizer_class, way):
    results = []
    for anew in (False, True):
        torch.manual_seed(1)
        params = [Parameter(torch.randn(shape)) for shape in SHAPES]
        optimizer = optimizer_class(
            [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}], lr=0.1, **way
        )
        reused = 0
        for change in [change for change in CHANGES.values() for _ in range(2)]:
            generator = torch.Generator().manual_seed(len(params))
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).as_strided(
                    param.shape, param.stride()
                )
            change(optimizer, params)
            if anew:
                optimizer._collected = None
            before = optimizer._collected
            optimizer.step()
            reused += optimizer._collected is before is not None
        results.append(params)
        assert bool(reused) == (not anew)
    assert_equal(*results)


@every_optimizer
def test_gradients_are_not_kept(optimizer_class):
    param = Parameter(torch.randn(3))
    optimizer = optimizer_class([param], lr=0.1)
    kept = []
    for _ in range(3):
        param.grad = torch.randn(3)
        kept.append(weakref.ref(param.grad))
        optimizer.step()
    param.grad = None
    assert [gradient() for gradient in kept] == [None] * 3
