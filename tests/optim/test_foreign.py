"""State dicts of other libraries' optimizers, and arguments that arrive in a state dict."""

import copy
import pickle

import pytest
import torch

from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.optim import LAMB, LARS
from tests.optim.test_bad_input import OUT_OF_RANGE
from tests.optim.ways import every_optimizer, random_params, relative_difference, set_random_grads
from tests.thread_ranks import run_ranks

timm = pytest.importorskip("timm.optim")
DECAYS = ({"weight_decay": 0.01}, {"weight_decay": 0.0})


def groups(params, **of_second):
    return [{"params": params[:4], **DECAYS[0]}, {"params": params[4:], **DECAYS[1], **of_second}]


def take_steps(optimizer, params, steps):
    for step in steps:
        set_random_grads(params, step)
        optimizer.step()


def assert_goes_on(theirs, params, ours, others):
    """``ours`` continues like ``theirs``, also once it was saved and loaded itself."""
    take_steps(theirs, params, range(3))
    with torch.no_grad():
        for param, source in zip(others, params, strict=True):
            param.copy_(source)
    ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer, stepped in ((theirs, params), (ours, others)):
        take_steps(optimizer, stepped, range(3, 6))
    for a, b in zip(others, params, strict=True):
        assert relative_difference(a, b) < 1e-13


@pytest.mark.parametrize(
    "options", [{}, {"trust_clip": True}, {"always_adapt": True, "max_grad_norm": 1.0}], ids=str
)
def test_lamb_goes_on_from_timms(options):
    params, others = random_params(), random_params()
    theirs = timm.Lamb(groups(params), **{"lr": 0.02, "max_grad_norm": None} | options)
    ours = LAMB(groups(others), max_grad_norm=options.get("max_grad_norm"))
    assert_goes_on(theirs, params, ours, others)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"always_adapt": True, "eps": 1e-3}], ids=str
)
def test_lars_goes_on_from_timms(options):
    params, others = random_params(), random_params()
    theirs = timm.Lars(
        groups(params), **{"lr": 0.5, "momentum": 0.9, "trust_coeff": 0.02} | options
    )
    assert_goes_on(theirs, params, LARS(groups(others)), others)


def of_apex(optimizer):
    """The state of a LAMB as apex's FusedLAMB saves it: with the step of a group, and no
    ``adapt``.
    """
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for name in ("trust_clip", "maximize", "adapt"):
            del group[name]
        group |= {"step": 3, "grad_averaging": True, "max_grad_norm": 1.0}
    saved["state"] = {
        key: {k: v for k, v in state.items() if k != "step"}
        for key, state in saved["state"].items()
    }
    return saved


def test_lamb_goes_on_from_apexs_which_adapts_what_decays():
    params, others = random_params(), random_params()
    theirs, ours = (
        LAMB(groups(p, adapt=False), lr=0.02, max_grad_norm=1.0) for p in (params, others)
    )
    take_steps(theirs, params, range(3))
    take_steps(ours, others, range(3))
    ours.load_state_dict(of_apex(theirs))
    assert [group["adapt"] for group in ours.param_groups] == [True, False]
    for optimizer, stepped in ((theirs, params), (ours, others)):
        take_steps(optimizer, stepped, range(3, 6))
    assert all(map(torch.equal, params, others))


def lamb_groups(*absent, **changed):
    group = timm.Lamb(random_params(), max_grad_norm=None).state_dict()["param_groups"][0]
    return {name: value for name, value in (group | changed).items() if name not in absent}


PLAIN_SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.1, "nesterov": False}


@pytest.mark.parametrize(
    ("cls", "group", "expected"),
    [
        (LAMB, lambda: lamb_groups(caution=True), "caution=True, expected False"),
        (LAMB, lambda: lamb_groups(decoupled_decay=True), "decoupled_decay=True, expected False"),
        (LAMB, lambda: lamb_groups(grad_averaging=False), "grad_averaging=False, expected True"),
        (LAMB, lambda: lamb_groups(max_grad_norm=1.0), "max_grad_norm=1.0, expected None"),
        (LAMB, lambda: lamb_groups(lr=-1.0), "lr=-1.0, expected"),
        (
            LAMB,
            lambda: {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
            "'betas', .*timm's Lamb",
        ),
        (
            LAMB,
            lambda: torch.optim.AdamW(random_params()).state_dict()["param_groups"][0],
            "'amsgrad', .*timm's Lamb",
        ),
        (LARS, lambda: PLAIN_SGD, "'dampening', .*timm's Lars"),
        (
            LARS,
            lambda: PLAIN_SGD | {"trust_coefficient": 0.01, "eps": 1e-8},
            "'dampening', .*timm's Lars",
        ),
        (
            LARS,
            lambda: timm.Lars(random_params(), dampening=0.5).param_groups[0],
            "dampening=0.5, expected 0",
        ),
        (
            LARS,
            lambda: timm.Lars(random_params(), trust_clip=True).param_groups[0],
            "trust_clip=True, expected 0",
        ),
    ],
)
def test_what_computes_something_else_is_refused(cls, group, expected):
    params = random_params()
    optimizer = cls(params)
    take_steps(optimizer, params, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"] = [group() | {"params": list(range(len(params)))}]
    with pytest.raises(ValueError, match=expected):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [bad for bad in OUT_OF_RANGE if bad[1:] != ("momentum", 1.0) and bad[1] != "max_grad_norm"]
    + [(LAMB, "trust_clip", False)],
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


def test_a_momentum_above_1_loads_because_momentum_correction_sets_it():
    optimizer = LARS(random_params(), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 1.35
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["momentum"] == 1.35


@every_optimizer
def test_keys_that_schedulers_and_scripts_add_stay(optimizer_class):
    optimizer = optimizer_class(random_params())
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"max_lr": 0.2, "lr_scale": 0.5}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


def test_sharded_lamb_goes_on_from_timms_too():
    theirs, params = torch.nn.Linear(8, 4), torch.ones(2, 8)
    optimizer = timm.Lamb(theirs.parameters(), lr=0.02, max_grad_norm=None)

    def step(net, optimizer):
        net(params).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(theirs, optimizer)
    weights, state = copy.deepcopy(theirs.state_dict()), copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(theirs, optimizer)

    def rank(comm):
        net = torch.nn.Linear(8, 4)
        net.load_state_dict(weights)
        ours = LAMB(net.parameters())
        sharded = Sharded()
        sharded.attach(net, [ours], comm, warn=pytest.fail)
        sharded.load_optimizer_state_dict(ours, state)
        for _ in range(3):
            with sharded.forward(wait=True):
                loss = net(params).square().mean()
            with sharded.backward():
                loss.backward()
            ours.step()
            ours.zero_grad()
        sharded.wait_parameters()
        for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

    run_ranks(2, rank)
