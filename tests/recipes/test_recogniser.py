"""The recogniser on two ranks, and what it refuses."""

from functools import partial

import pytest
import torch
from pytorch_metric_learning.losses import ArcFaceLoss, SupConLoss

from recipes.recogniser import Recogniser
from recipes.recognition.losses import MetricLoss
from tests.battery import check_names
from tests.refusals import refused

MODULE = "tests.checks.recogniser"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_recogniser_on_two_ranks(battery, check):
    battery(MODULE, 2, check)


@pytest.mark.parametrize(("classification", "metric"), [(0, 0), (-1, 1), (1, -1)])
def test_losses_that_leave_nothing_to_train_are_refused(classification, metric):
    weights = {
        "classification_weight": classification,
        "metric_weight": metric,
        "metric_loss": torch.nn.Identity(),
    }
    with pytest.raises(ValueError, match="neither may be negative, and one must be positive"):
        Recogniser(torch.nn.Identity(), 8, 5, partial(torch.optim.SGD, lr=1), None, **weights)


def test_a_memory_is_for_losses_between_embeddings_and_holds_a_batch():
    with refused("given with ArcFaceLoss, expected a positive memory"):
        MetricLoss(ArcFaceLoss(5, 8), memory=32, embedding_size=8)
    loss = MetricLoss(SupConLoss(), memory=4, embedding_size=8)
    with refused("a memory of 4 images cannot hold the batch of 6"):
        loss(torch.randn(6, 8), torch.arange(6))
