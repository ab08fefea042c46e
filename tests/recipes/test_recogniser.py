"""The recogniser on two ranks, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from recipes.models.embedder import SmallEmbedder
from recipes.recogniser import Recogniser
from tests.battery import Battery, check_names

MODULE = "tests.checks.recogniser"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_recogniser_on_two_ranks(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check)


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1)])
def test_losses_that_leave_nothing_to_train_are_refused(weights) -> None:
    with pytest.raises(ValueError, match="neither may be negative, and one must be positive"):
        Recogniser(torch.nn.Identity(), 8, 5, partial(torch.optim.SGD, lr=1), None, *weights)


def test_embeddings_have_unit_length_at_any_size() -> None:
    model = Recogniser(SmallEmbedder([4, 8], 16), 16, 5, partial(torch.optim.SGD, lr=1))
    for size in (32, 48):
        embeddings = model(torch.randn(3, 3, size, size))
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
