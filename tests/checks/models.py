"""Small modules and loaders that several checks train, and `fit`, which trains one under a
strategy by name.
"""

import hashlib
import logging
import warnings
from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ring  # noqa: F401  registers "ring"
from lightning_ring.gradients.sharded_gradient import ShardedGradient
from tests.checks.ranks import WORLD
from tests.trainers import QUIET

RANK, SIZE = WORLD.rank, WORLD.size
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(L.LightningModule):
    """A perceptron (no BatchNorm unless asked) with what a check wants to see noted in ``seen``."""

    def __init__(self, *, batch_norm=False, dropout=0.0, lr=0.1, momentum=0.9):
        super().__init__()
        norm = [nn.BatchNorm1d(16)] if batch_norm else []
        self.net = nn.Sequential(
            nn.Linear(8, 16), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.lr = lr
        self.momentum = momentum
        self.seen = {"loss": [], "index": [], "gradient": [], "eval": []}

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0].to(self.net[0].weight.dtype)), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen["loss"].append(loss.detach().clone())
        self.seen["index"].append(batch[2].tolist())
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen["eval"].append(batch[2].tolist())
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[2]

    def on_after_backward(self):
        whole = [
            p.grad
            for p in self.parameters()
            if p.grad is not None and not isinstance(p.grad, ShardedGradient)
        ]
        grads = [grad.detach().reshape(-1).double() for grad in whole]
        self.seen["gradient"].append(torch.cat(grads).clone() if grads else torch.zeros(0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def data(num=48):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num, 8, generator=generator),
        torch.randint(0, 4, (num,), generator=generator),
        torch.arange(num),
    )


def loader(num=48, batch_size=4, **kwargs):
    return DataLoader(data(num), batch_size=batch_size, **kwargs)


def ddp(**kwargs):
    """Lightning's own strategy over Gloo, on the ranks that MPI started."""
    return DDPStrategy(cluster_environment=MPIEnvironment(), process_group_backend="gloo", **kwargs)


def trainer(strategy="ring", **kwargs):
    if type(strategy) is DDPStrategy:
        kwargs.setdefault("devices", SIZE)
    defaults = {"accelerator": "cpu", "max_epochs": 2, "num_sanity_val_steps": 0, **QUIET}
    return L.Trainer(strategy=strategy, **(defaults | kwargs))


def fit(strategy, module, train=None, val=None, **kwargs):
    run = trainer(strategy, **kwargs)
    run.fit(module, loader() if train is None else train, val)
    return run


def parameters(module):
    """All parameters as one float64 vector: float32 values keep their bits."""
    return torch.cat([p.detach().reshape(-1).double() for p in module.parameters()])


def warned_on_rank_0(message):
    """Around code that warns of ``message`` on rank 0."""
    return pytest.warns(UserWarning, match=message) if RANK == 0 else nullcontext()


def assert_all_ranks_equal(values):
    digest = hashlib.blake2b(values.double().contiguous().numpy()).digest()
    assert len(set(WORLD.allgather(digest))) == 1, "ranks hold different bits"


def relative_difference(a, b):
    return float((a - b).norm() / b.norm())
