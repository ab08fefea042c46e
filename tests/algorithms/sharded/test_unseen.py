"""Which code counts as reading parameters unseen."""

from __future__ import annotations

import torch
import torch.func as fn
from torch import Tensor, nn, vmap

from lightning_ring.algorithms.sharded.compiled_code import find_unseen_reader


def test_plain_and_compiled_modules_are_seen() -> None:
    assert (
        find_unseen_reader(
            nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
        )
        is None
    )


def test_functions_a_module_holds_and_modules_compiled_in_place_are_not() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    module[1].act = torch.compile(torch.tanh, backend="eager")
    assert find_unseen_reader(module) == "1.act"
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend="eager")
    assert find_unseen_reader(module) == "0"


def test_functions_kept_from_the_compiler_are_seen() -> None:
    module = nn.Linear(2, 2)
    module.act = torch.compiler.disable(torch.tanh)
    assert find_unseen_reader(module) is None


def test_transforms_of_functions_are_found_however_they_are_imported() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self, {}, x) + torch.autograd.grad(x, x)[0]

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(torch.sum)(x)

    class Renamed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fn.jacrev(torch.sum)(x)

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (lambda y: vmap(torch.sum)(y))(x)

    assert find_unseen_reader(Plain()) is None
    assert [find_unseen_reader(kind()) for kind in (Whole, Renamed, Function)] == [
        "torch.func.grad",
        "torch.func.jacrev",
        "vmap",
    ]
