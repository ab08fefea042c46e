"""Embeddings with sparse gradients under a Trainer, against Lightning's DDP, which sends them
sparse as well.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ring.errors import ConfigurationError
from tests.checks.marks import by_world_size
from tests.checks.models import Classifier, fit
from tests.checks.strategy.references import assert_like_ddp, both


class _Words(Classifier):
    """Only an embedding, and SparseAdam, which takes nothing but sparse gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.EmbeddingBag(50, 4, sparse=True, mode="mean")

    def loss(self, batch):
        return F.cross_entropy(self.net((batch[0].abs() * 10).long().clamp(max=49)), batch[1])

    def on_after_backward(self):
        assert self.net.weight.grad.is_sparse

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.parameters(), lr=0.01)


class _WordsAndLayers(_Words):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.large = nn.Embedding(5000, 4, sparse=True)

    def loss(self, batch):
        ids = (batch[0].abs() * 10).long().clamp(max=49)
        return F.cross_entropy(self.head(self.net(ids) + self.large(ids[:, 0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@by_world_size
def check_sparse_adam_equals_ddp():
    assert_like_ddp(*both(_Words))
    assert_like_ddp(*both(_Words, accumulate_grad_batches=3))
    assert_like_ddp(*both(_WordsAndLayers, gradient_clip_val=0.1))


def check_sparse_adam_under_ring_sharded_is_refused_with_advice_that_works():
    with pytest.raises(
        ConfigurationError, match=r"SparseAdam cannot be sharded.*use strategy='ring'"
    ):
        fit("ring_sharded", _Words())
    before = (module := _Words()).net.weight.detach().clone()
    fit("ring", module, max_epochs=1)
    assert not torch.equal(module.net.weight, before)
