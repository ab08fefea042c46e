"""Float64 against a transcription of the papers in NumPy: 50 steps."""

import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.oracles import ORACLES
from tests.optim.ways import every_way, random_params, relative_difference, set_random_grads

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
    for param, weight in zip(params, weights, strict=True):
        assert relative_difference(param, torch.as_tensor(weight)) < 1e-12
