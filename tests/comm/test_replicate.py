"""Replication on thread-ranks: what travels, and what the ranks are told where their models
differ.
"""

import pytest
import torch
from torch import nn

from lightning_ring.comm import replicate
from lightning_ring.comm.replicate import (
    broadcast_module,
    broadcast_optimizer_state,
    check_same_model,
)
from lightning_ring.errors import ConfigurationError, ModelMismatchError
from tests.thread_ranks import run_ranks


class Everything(nn.Module):
    """Parameters and buffers of every kind that a model may hold."""

    def __init__(self, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=g))
        self.tied = self.weight
        self.strided = nn.Parameter(torch.randn(4, 6, generator=g).t())
        self.scale = nn.Parameter(torch.randn((), generator=g))
        self.rounded = nn.Parameter(torch.randn(7, generator=g).bfloat16(), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.normal_(generator=g)
        self.register_buffer("mask", torch.rand(9, generator=g) < 0.5)
        self.register_buffer("count", torch.tensor(seed), persistent=False)
        self.register_buffer("repeated", torch.randn(1, 4, generator=g).expand(3, 4))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64, generator=g))


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(one, other):
    for name, tensor in tensors(one).items():
        assert torch.equal(tensor, tensors(other)[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("message_bytes", [1, 64, 1 << 20])
def test_all_ranks_get_every_tensor_of_the_source(world_size, message_bytes, monkeypatch):
    monkeypatch.setattr(replicate, "MESSAGE_BYTES", message_bytes)
    src = world_size - 1

    def rank(comm):
        module = Everything(comm.rank)
        identities = [id(tensor) for tensor in tensors(module).values()]
        check_same_model(module, comm)
        broadcast_module(module, comm, src=src)
        assert [id(tensor) for tensor in tensors(module).values()] == identities  # in place
        assert module.tied is module.weight
        return module

    for module in run_ranks(world_size, rank):
        assert_same(module, Everything(src))


def trained(seed, optimizer_class, steps, **kwargs):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), **kwargs)
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "capturable": False, "foreach": False}),
    ],
)
def test_ranks_without_optimizer_state_get_it_and_step_alike(optimizer_class, kwargs):
    def rank(comm):
        kwargs_here = {
            key: value.clone() if torch.is_tensor(value) else value for key, value in kwargs.items()
        }
        # rank 1 has no state, rank 2 has other state
        steps = 3 if comm.rank == 0 else comm.rank - 1
        model, optimizer = trained(comm.rank, optimizer_class, steps, **kwargs_here)
        if comm.rank == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        broadcast_module(model, comm)
        broadcast_optimizer_state(optimizer, comm)
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()
        return model, optimizer

    results = run_ranks(3, rank)
    for model, optimizer in results:
        assert_same(model, results[0][0])
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
        assert str(optimizer.state_dict()) == str(results[0][1].state_dict())


def errors(build, error_class=ModelMismatchError):
    def rank(comm):
        with pytest.raises(error_class) as caught:
            check_same_model(build(comm.rank), comm)
        comm.barrier()  # the communicator is still good
        return str(caught.value)

    messages = run_ranks(3, rank)
    assert len(set(messages)) == 1  # every rank is told the same
    return messages[0]


def in_order(rank):
    names = ["a", "b"] if rank else ["b", "a"]
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda rank: nn.Linear(4 + (rank == 1), 2),
            ["parameter weight: ranks 0, 2: float32 (2, 4) on cpu; rank 1: float32 (2, 5) on cpu"],
        ),
        (
            lambda rank: nn.Linear(4, 2).to(torch.float64 if rank == 2 else torch.float32),
            ["rank 2: float64 (2, 4)"],
        ),
        (
            lambda rank: nn.Linear(4, 2).requires_grad_(rank != 0),
            ["rank 0: float32 (2, 4) on cpu, frozen"],
        ),
        (
            lambda rank: nn.Linear(4, 2, bias=rank != 1),
            [
                "ranks 0, 2: 2 parameters and buffers; rank 1: 1 parameters and buffers",
                "parameter bias: ranks 0, 2: float32 (2,) on cpu; rank 1: missing",
            ],
        ),
        (
            lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0),
            ["buffer running_mean: rank 0: float32 (2,) on cpu; ranks 1, 2: missing"],
        ),
        (in_order, ["order, from number 0: rank 0: parameter b.weight; ranks 1, 2: parameter a"]),
        (
            lambda rank: nn.Sequential(*(nn.Linear(2 + rank, 2) for _ in range(20))),
            ["parameter 0.weight", "and 16 more"],
        ),
    ],
)
def test_a_difference_names_tensors_and_ranks(build, words):
    message = errors(build)
    for text in words:
        assert text in message


def test_parameters_without_values_are_refused():
    message = errors(lambda rank: nn.LazyLinear(3), ConfigurationError)
    assert "weight holds no values yet (it is lazy)" in message
    message = errors(lambda rank: nn.Linear(2, 3, device="meta"), ConfigurationError)
    assert "weight holds no values yet (it is on the meta device)" in message
    assert "parameter weight: rank 0: float32 not initialised on cpu" in errors(
        lambda rank: nn.LazyLinear(3, bias=False) if rank == 0 else nn.Linear(2, 3, bias=False)
    )


def test_different_optimizers_are_refused_on_every_rank():
    def rank(comm):
        model = nn.Linear(2, 2)
        params = list(model.parameters())[: 1 + comm.rank]
        with pytest.raises(
            ModelMismatchError,
            match=r"rank 0: SGD with \[1\] parameters in its groups; rank 1: SGD",
        ):
            broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1), comm)

    run_ranks(2, rank)
