"""Which optimizers may step parts of tensors, and that the others are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import LAMB, LARS

PARAMS = [(4, 3), (5,)]


def params() -> list[Parameter]:
    return [Parameter(torch.ones(shape)) for shape in PARAMS]


class Lion(Optimizer):
    """An optimizer that lightning_ring does not know; ``update`` makes variants of it that look
    further.
    """

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return moment.sign()

    def factor(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor()
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                moment.lerp_(param.grad, 1 - group["beta"])
                param.sub_(group["lr"] * factor * self.update(moment, group))


class Centred(Lion):
    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return moment - moment.mean() if moment.dim() > 1 else moment


class ByRows(Lion):
    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return moment / moment.norm(dim=-1, keepdim=True)


class WholeModelNorm(Lion):
    def factor(self) -> float:
        return 1 / max(
            1.0,
            float(
                torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm()
            ),
        )


class LateCentred(Lion):
    num_steps = 0

    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        self.num_steps += 1
        return moment - moment.mean() if self.num_steps > 15 else moment


class Noisy(Lion):
    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return moment + torch.randn_like(moment)


class SomeGroups(Lion):
    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "beta": beta, "matrix": False})

    def update(self, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return moment - moment.mean() if group["matrix"] else moment


class NeedsModel(Lion):
    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params)


class Trusted(NeedsModel):
    elementwise = True


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Rprop, LARS, LAMB, Lion]
)
def test_element_wise_optimizers_are_accepted(kind: Any) -> None:
    check_can_be_sharded(kind(params(), lr=0.1))


@pytest.mark.parametrize("kind", [Centred, ByRows, WholeModelNorm, LateCentred, Noisy])
def test_an_unknown_one_that_looks_further_is_found_out(kind: Any) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(
        ConfigurationError,
        match=rf"{kind.__name__} cannot be sharded.*another step.*strategy='ring'",
    ):
        check_can_be_sharded(kind(params()))
    # trying it draws no number of the script's
    assert torch.equal(torch.random.get_rng_state(), before)


def test_settings_of_every_group_are_tried() -> None:
    first, second = params()
    check_can_be_sharded(SomeGroups([{"params": [first]}, {"params": [second]}]))
    with pytest.raises(ConfigurationError, match="another step"):
        check_can_be_sharded(
            SomeGroups([{"params": [first]}, {"params": [second], "matrix": True}])
        )


def test_a_learning_rate_that_starts_at_zero_hides_nothing() -> None:
    with pytest.raises(ConfigurationError, match="another step"):
        check_can_be_sharded(Centred(params(), lr=0.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.LBFGS(params()),
        lambda: torch.optim.Adafactor(params()),
        lambda: torch.optim.SparseAdam(params()),
        lambda: torch.optim.Muon(params()[:1]),
    ],
    ids=["LBFGS", "Adafactor", "SparseAdam", "Muon"],
)
def test_torchs_own_that_look_at_whole_tensors_are_refused(
    make: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    with pytest.raises(
        ConfigurationError, match=rf"{name} cannot be sharded.*whole tensors.*strategy='ring'"
    ):
        check_can_be_sharded(make())


def test_one_that_cannot_be_tried_is_refused_unless_it_says_so_itself() -> None:
    with pytest.raises(ConfigurationError, match=r"raised TypeError.*elementwise = True"):
        check_can_be_sharded(NeedsModel(params(), object()))
    check_can_be_sharded(Trusted(params(), object()))
