"""`RingStrategy` on real ranks gives the numbers of Lightning's DDP and of one process on the
whole batch.
"""

import copy
import functools

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from tests.checks.marks import by_world_size
from tests.checks.models import (
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
    relative_difference,
    trainer,
)
from tests.checks.strategy.references import assert_like_ddp, both, scaler_plugin


class Convolutions(nn.Module):
    """What a ResNet is made of, once: a strided convolution, BatchNorm, and a sum of two ways."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.branch(x)).mean((2, 3)))


@by_world_size
def check_equals_ddp_in_convolutions_with_batch_norm():
    """ResNet-18 on two ranks, whose bits are equal. (With more the order of additions differs, and
    BatchNorm over the few values of its last layers magnifies a rounding error 1e5 times.) A small
    network on any.
    """
    from torchvision.models import resnet18

    class Image(Classifier):
        def __init__(self, network):
            super().__init__(lr=0.01)
            self.net = network()
            self.first = parameters(self)

        def loss(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_after_backward(self): ...

    networks = [(Convolutions, 20)]
    if SIZE == 2:
        networks.append((functools.partial(resnet18, num_classes=10), 2))
    for network, steps in networks:
        num = steps * SIZE * 4
        generator = torch.Generator().manual_seed(3)
        images = torch.utils.data.TensorDataset(
            torch.randn(num, 3, 32, 32, generator=generator),
            torch.randint(0, 10, (num,), generator=generator),
            torch.arange(num),
        )
        ring, reference = both(
            functools.partial(Image, network), DataLoader(images, batch_size=4), max_epochs=1
        )
        assert len(ring.seen["loss"]) == steps
        # it moved a hundred times what may differ
        assert relative_difference(parameters(ring), ring.first) > 1e-3
        assert_like_ddp(ring, reference)


@by_world_size
def check_precisions_equal_ddp():
    for precision, tolerance in (("bf16-mixed", 1e-2), ("bf16-true", 1e-2), ("64-true", 1e-12)):
        assert_like_ddp(*both(Classifier, precision=precision), tolerance)
    assert_like_ddp(*both(Classifier, plugins=scaler_plugin))


def check_weight_averaging():
    def ema():
        return WeightAveraging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))

    def swa():
        return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)

    for make in (ema, swa):
        assert_like_ddp(*both(Classifier, callbacks=make, max_epochs=3))


def check_compiled_modules():
    module = Classifier()
    reference = copy.deepcopy(module)
    run = trainer("ring", max_epochs=1)
    run.fit(torch.compile(module, backend="eager"), loader())
    fit("ring", reference, max_epochs=1)
    assert relative_difference(parameters(module), parameters(reference)) < 1e-6
    assert_all_ranks_equal(parameters(module))


def check_a_reduced_loss_keeps_its_gradient():
    class Reducing(Classifier):
        def training_step(self, batch, batch_idx):
            return self.trainer.strategy.reduce(self.loss(batch) * 1.0)

    assert_like_ddp(*both(Reducing))
