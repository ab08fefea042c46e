"""Parameters cut over ranks give the weights of one rank with whole tensors."""

import copy
import pickle

import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.ways import (
    assert_near,
    every_optimizer,
    every_way,
    random_params,
    set_random_grads,
)
from tests.thread_ranks import run_ranks

NUM_STEPS = 4
SHAPES = [(40, 7), (300,), (1,), (), (0,), (70_001,)]
# Where each tensor is cut, as shares of its length: ranks get equal, ragged and empty slices.
CUTS = {"one rank": [], "ragged": [0.1, 0.15, 0.9], "empty first and last": [0.0, 0.4, 1.0]}
SETTINGS = [
    (LARS, {"lr": 0.5, "weight_decay": 0.01}),
    (
        LARS,
        {
            "lr": 0.5,
            "weight_decay": 0.01,
            "momentum_form": "torch",
            "nesterov": True,
            "skip_nonfinite": True,
        },
    ),
    (LAMB, {"lr": 0.01}),
    (LAMB, {"lr": 0.01, "max_grad_norm": 1.0, "skip_nonfinite": True}),
]
every_setting = pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda s: s[0].__name__ + "-" + "-".join(s[1])
)


def cut(tensor, shares, rank):
    bounds = [0, *(int(share * tensor.numel()) for share in shares), tensor.numel()]
    return tensor.detach().reshape(-1)[bounds[rank] : bounds[rank + 1]].clone()


def train_sharded(cls, kwargs, way, shares, dtype, bad_step=None):
    """Weights put together again, from ranks that each hold slices; the length of each vector that
    was summed, by rank; optimizers.
    """
    whole = random_params(dtype=dtype, shapes=SHAPES)

    def rank(comm):
        summed = []

        def all_reduce(vector):
            summed.append(len(vector))
            comm.all_reduce_(vector).wait()

        slices = [cut(p, shares, comm.rank).requires_grad_() for p in whole]
        optimizer = cls(grouped(slices), **kwargs, **way)
        # after construction, as the strategy sets it
        optimizer.norm_all_reduce = all_reduce
        full = random_params(dtype=dtype, shapes=SHAPES)
        for step in range(NUM_STEPS):
            set_grads(full, step, bad_step)
            for piece, param in zip(slices, full, strict=True):
                piece.grad = cut(param.grad, shares, comm.rank)
            optimizer.step()
        return [piece.detach() for piece in slices], summed, optimizer

    slices, summed, optimizers = zip(*run_ranks(len(shares) + 1, rank), strict=True)
    return [torch.cat(pieces) for pieces in zip(*slices, strict=True)], summed, optimizers


def grouped(params):
    return [{"params": params[:2]}, {"params": params[2:], "adapt": False}]


def set_grads(params, step, bad_step):
    set_random_grads(params, step)
    if step == bad_step:
        params[1].grad[7] = float("inf")


def train_whole(cls, kwargs, way, dtype, bad_step=None):
    params = random_params(dtype=dtype, shapes=SHAPES)
    optimizer = cls(grouped(params), **kwargs, **way)
    for step in range(NUM_STEPS):
        set_grads(params, step, bad_step)
        optimizer.step()
    return params, optimizer


@every_way
@every_setting
@pytest.mark.parametrize("shares", CUTS.values(), ids=CUTS)
def test_equals_one_rank_with_whole_tensors(setting, way, shares):
    cls, kwargs = setting
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        weights, summed, optimizers = train_sharded(cls, kwargs, way, shares, dtype)
        params, whole = train_whole(cls, kwargs, way, dtype)
        assert_near(weights, [param.reshape(-1) for param in params], tolerance)
        per_step = 2 if {"max_grad_norm", "skip_nonfinite"} & set(kwargs) else 1
        assert [len(calls) for calls in summed] == [4 * per_step] * (len(shares) + 1)
        for optimizer in optimizers:
            assert torch.equal(optimizer.trust_ratios, optimizers[0].trust_ratios)
            torch.testing.assert_close(
                optimizer.trust_ratios, whole.trust_ratios, rtol=10 * tolerance, atol=0
            )


@every_way
@every_setting
def test_all_ranks_skip_a_step_that_one_cannot_take(setting, way):
    cls, kwargs = setting
    kwargs = kwargs | {"skip_nonfinite": True}
    weights, _, optimizers = train_sharded(cls, kwargs, way, [0.5, 0.9], torch.float64, bad_step=2)
    params, whole = train_whole(cls, kwargs, way, torch.float64, bad_step=2)
    assert [optimizer.skipped_steps for optimizer in [whole, *optimizers]] == [1] * 4
    assert_near(weights, [param.reshape(-1) for param in params], 1e-12)  # finite, too


@every_optimizer
@every_way
def test_a_rank_without_gradients_still_takes_part(optimizer_class, way):
    calls = []
    optimizer = optimizer_class(random_params(), **way)
    optimizer.norm_all_reduce = calls.append
    optimizer.step()
    assert [tuple(vector.shape) for vector in calls] == [(2 * 8,)]
    assert calls[0].dtype == torch.float64
    assert not calls[0].any()


@every_optimizer
def test_the_function_is_not_part_of_copies_and_checkpoints(optimizer_class):
    optimizer = optimizer_class(random_params())
    optimizer.norm_all_reduce = lambda vector: None
    assert pickle.loads(pickle.dumps(optimizer)).norm_all_reduce is None
    assert copy.deepcopy(optimizer).norm_all_reduce is None
    assert "norm_all_reduce" not in optimizer.state_dict()["param_groups"][0]
