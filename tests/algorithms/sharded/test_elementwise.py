"""Which optimizers may step parts of tensors, and that the others are named."""

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.optim import LAMB, LARS
from tests.refusals import refused


def params():
    return [Parameter(torch.ones(4, 3)), Parameter(torch.ones(5))]


class Unknown(SGD):
    pass


class Trusted(SGD):
    elementwise = True


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW, torch.optim.Rprop, LARS, LAMB, Trusted])
def test_elementwise_optimizers_are_accepted(kind):
    check_can_be_sharded(kind(params(), lr=0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.LBFGS(params()),
        lambda: torch.optim.Adafactor(params()),
        lambda: torch.optim.SparseAdam(params()),
        lambda: torch.optim.Muon(params()[:1]),
        lambda: Unknown(params()),
    ],
    ids=["LBFGS", "Adafactor", "SparseAdam", "Muon", "Unknown"],
)
def test_others_are_refused(make, request):
    name = request.node.callspec.id
    if name != "Unknown" and not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    with refused(rf"{name} cannot be sharded.*elementwise = True.*strategy='ring'"):
        check_can_be_sharded(make())


def test_what_is_no_optimizer_is_refused():
    with refused(r"no torch\.optim\.Optimizer"):
        check_can_be_sharded(object())
