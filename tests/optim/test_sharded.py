"""Parameters cut over ranks give the weights of one rank with whole tensors."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_ring.optim import LAMB, LARS
from tests.optim.ways import (
    every_optimizer,
    every_way,
    random_params,
    relative_difference,
    set_random_grads,
)

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


class SumOverRanks:
    """Sums a vector over ranks that are threads; every wait is bounded."""

    def __init__(self, world_size, in_place):
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.vectors = [None] * world_size
        self.calls = [0] * world_size
        self.in_place = in_place

    def on(self, rank):
        def all_reduce(vector):
            assert vector.dim() == 1
            self.calls[rank] += 1
            self.vectors[rank] = vector.clone()
            self.barrier.wait()
            total = torch.stack(self.vectors).sum(0)
            self.barrier.wait()
            if not self.in_place:
                return total
            vector.copy_(total)
            return None

        return all_reduce


def cut(tensor, shares, rank):
    bounds = [0, *(int(share * tensor.numel()) for share in shares), tensor.numel()]
    return tensor.detach().reshape(-1)[bounds[rank] : bounds[rank + 1]].clone()


def train_sharded(cls, kwargs, way, shares, dtype, in_place=True, num_steps=4, bad_step=None):
    """Weights put together again, from ranks that each hold slices; calls of the reduction;
    skipped steps by rank.
    """
    world_size = len(shares) + 1
    reduction = SumOverRanks(world_size, in_place)
    whole = random_params(dtype=dtype, shapes=SHAPES)

    def rank_main(rank):
        slices = [cut(p, shares, rank).requires_grad_() for p in whole]
        groups = [{"params": slices[:2]}, {"params": slices[2:], "adapt": False}]
        optimizer = cls(groups, **kwargs, **way)
        # after construction, as the strategy sets it
        optimizer.norm_all_reduce = reduction.on(rank)
        full = random_params(dtype=dtype, shapes=SHAPES)
        for step in range(num_steps):
            set_grads(full, step, bad_step)
            for piece, param in zip(slices, full, strict=True):
                piece.grad = cut(param.grad, shares, rank)
            optimizer.step()
        return slices, optimizer

    with ThreadPoolExecutor(world_size) as pool:
        results = [
            future.result(timeout=120)
            for future in [pool.submit(rank_main, r) for r in range(world_size)]
        ]
    weights = [torch.cat([slices[i].detach() for slices, _ in results]) for i in range(len(SHAPES))]
    return weights, reduction.calls, [optimizer for _, optimizer in results]


def set_grads(params, step, bad_step):
    set_random_grads(params, step)
    if step == bad_step:
        params[1].grad[7] = float("inf")


def train_whole(cls, kwargs, way, dtype, num_steps=4, bad_step=None):
    params = random_params(dtype=dtype, shapes=SHAPES)
    groups = [{"params": params[:2]}, {"params": params[2:], "adapt": False}]
    optimizer = cls(groups, **kwargs, **way)
    for step in range(num_steps):
        set_grads(params, step, bad_step)
        optimizer.step()
    return params, optimizer


@every_way
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s[0].__name__ + "-" + "-".join(s[1]))
@pytest.mark.parametrize("shares", CUTS.values(), ids=CUTS)
def test_equals_one_rank_with_whole_tensors(setting, way, shares):
    cls, kwargs = setting
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        weights, calls, optimizers = train_sharded(cls, kwargs, way, shares, dtype)
        params, whole = train_whole(cls, kwargs, way, dtype)
        for weight, param in zip(weights, params, strict=True):
            assert relative_difference(weight, param.reshape(-1)) < tolerance
        per_step = 2 if {"max_grad_norm", "skip_nonfinite"} & set(kwargs) else 1
        assert calls == [4 * per_step] * (len(shares) + 1)
        for optimizer in optimizers:
            assert torch.equal(optimizer.trust_ratios, optimizers[0].trust_ratios)
            torch.testing.assert_close(
                optimizer.trust_ratios, whole.trust_ratios, rtol=10 * tolerance, atol=0
            )


@every_way
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s[0].__name__ + "-" + "-".join(s[1]))
def test_all_ranks_skip_a_step_that_one_cannot_take(setting, way):
    cls, kwargs = setting
    kwargs = kwargs | {"skip_nonfinite": True}
    weights, _, optimizers = train_sharded(cls, kwargs, way, [0.5, 0.9], torch.float64, bad_step=2)
    params, whole = train_whole(cls, kwargs, way, torch.float64, bad_step=2)
    assert [optimizer.skipped_steps for optimizer in [whole, *optimizers]] == [1] * 4
    for weight, param in zip(weights, params, strict=True):
        assert torch.isfinite(weight).all()
        assert relative_difference(weight, param.reshape(-1)) < 1e-12


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
