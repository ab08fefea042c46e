"""Float64 against implementations that others wrote (optax) and a transcription of the papers
(NumPy): 50 steps.
"""

import functools

import numpy as np
import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.oracles import ORACLES
from tests.optim.ways import assert_near, every_way, random_params, set_random_grads, take_steps

NUM_STEPS = 50
SETTINGS = [
    (LARS, {"lr": 0.5}),
    (LARS, {"lr": 0.5, "momentum": 0.0, "weight_decay": 1e-2, "eps": 1e-3}),
    (LARS, {"lr": 0.5, "weight_decay": 1e-2, "nesterov": True}),
    (LARS, {"lr": 0.5, "weight_decay": 1e-2, "momentum_form": "torch", "trust_coefficient": 0.02}),
    (
        LARS,
        {
            "lr": 0.5,
            "weight_decay": 1e-2,
            "momentum_form": "torch",
            "nesterov": True,
            "maximize": True,
        },
    ),
    (LARS, {"lr": 0.01, "weight_decay": 1e-2, "adapt": False}),
    (LAMB, {"lr": 0.01}),
    (
        LAMB,
        {
            "lr": 0.01,
            "betas": (0.8, 0.95),
            "eps": 1e-3,
            "weight_decay": 0.0,
            "bias_correction": False,
        },
    ),
    (LAMB, {"lr": 0.01, "trust_clip": 0.7, "maximize": True}),
    (LAMB, {"lr": 0.01, "max_grad_norm": 1.0}),
    (LAMB, {"lr": 0.01, "weight_decay": 0.1, "adapt": False}),
]


def names(setting):
    cls, kwargs = setting
    return cls.__name__ + "-" + "-".join(f"{k}={v}" for k, v in kwargs.items())


@every_way
@pytest.mark.parametrize("setting", SETTINGS, ids=names)
def test_equals_the_papers_in_numpy(setting, way):
    cls, kwargs = setting
    params = random_params()
    weights = [p.detach().numpy().copy() for p in params]
    optimizer, oracle = cls(params, **kwargs, **way), ORACLES[cls.__name__](**kwargs)
    for step in range(NUM_STEPS):
        set_random_grads(params, step)
        lr = kwargs["lr"] * (1 + step % 5)  # changing: the two momentum forms differ only then
        optimizer.param_groups[0]["lr"] = oracle.lr = lr
        if step % 7 == 3:
            params[2].grad = None  # its state and step count must stand still
        oracle.step(weights, [None if p.grad is None else p.grad.numpy() for p in params])
        optimizer.step()
    assert_near(params, map(torch.as_tensor, weights), 1e-12)


@every_way
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_equals_optax(way, weight_decay):
    expected = trained_by_optax("lamb", 0.01, b1=0.9, b2=0.999, eps=1e-6, weight_decay=weight_decay)
    check_against_optax(
        expected, lambda params: LAMB(params, lr=0.01, weight_decay=weight_decay, **way)
    )


@every_way
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_without_weight_decay_equals_optax(way, nesterov):
    settings = {
        "weight_decay": 0.0,
        "momentum": 0.9,
        "nesterov": nesterov,
        "trust_coefficient": 0.001,
        "eps": 1e-4,
    }
    expected = trained_by_optax("lars", 0.5, **settings)
    check_against_optax(
        expected, lambda params: LARS(params, lr=0.5, nesterov=nesterov, eps=1e-4, **way)
    )


@functools.cache
def trained_by_optax(name, lr, **settings):
    """The weights after all steps, computed once for all ways."""
    import jax  # deferred: each worker collects this file, and one needs it
    import optax

    params, transform = random_params(), getattr(optax, name)(lr, **settings)
    with jax.enable_x64():
        weights = [jax.numpy.asarray(p.detach().numpy().copy()) for p in params]
        state = transform.init(weights)
        update = jax.jit(transform.update)
        for step in range(NUM_STEPS):
            set_random_grads(params, step)
            updates, state = update(
                [jax.numpy.asarray(p.grad.numpy()) for p in params], state, weights
            )
            weights = optax.apply_updates(weights, updates)
        return [torch.from_numpy(np.array(weight)) for weight in weights]


def check_against_optax(expected, make):
    params = random_params()
    take_steps(make(params), params, 0, NUM_STEPS)
    assert_near(params, expected, 1e-12)
