"""Image classification as a LightningModule: any network, any optimizer, any schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, SumMetric

from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.schedules import WarmupLR
from recipes.from_configuration import FromConfiguration


class Classifier(FromConfiguration):
    """Trains ``network`` (images to logits) with cross-entropy.

    Args:
        network: Module from images ``[batch, channels, height, width]`` to logits ``[batch,
            num_classes]``.
        optimizer: Called with parameter groups, in which biases and normalization layers have no
            weight decay.
        schedule: Called with ``total``, the number of optimizer steps of the whole run; gives a
            function from step to factor, as those in `lightning_ring.schedules`. None keeps the
            learning rate constant.
        label_smoothing: Of the training loss (Szegedy et al. 2015, arXiv:1512.00567, section 7).
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: partial[Optimizer],
        schedule: Callable[..., Callable[[int], float]] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.schedule = schedule
        self.label_smoothing = label_smoothing
        self.val_loss, self.val_accuracy = MeanMetric(), MeanMetric()
        self.test_loss, self.test_accuracy = MeanMetric(), MeanMetric()
        self.test_images = SumMetric()

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/accuracy", accuracy(logits, labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate("val", batch, self.val_loss, self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate("test", batch, self.test_loss, self.test_accuracy)
        self.test_images.update(len(batch[1]))
        self.log("test/images", self.test_images, on_step=False, on_epoch=True)

    def evaluate(
        self, stage: str, batch: tuple[Tensor, Tensor], loss: MeanMetric, correct: MeanMetric
    ) -> None:
        """Log loss and accuracy over all ranks' images, exact whatever the size of each batch and
        of each rank's share.

        Metric objects, because ``self.log(value, sync_dist=True)`` averages the ranks' numbers of
        images as integers: 180 and 179 images become 179, and an accuracy can exceed 1.
        """
        images, labels = batch
        logits = self(images)
        loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        correct.update(accuracy(logits, labels), weight=len(labels))
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/accuracy", correct, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        weight_decay = self.optimizer.keywords.get("weight_decay", 0.0)
        optimizer = self.optimizer(exclude_bias_and_norm(self.network, weight_decay))
        if self.schedule is None:
            return optimizer
        scheduler = WarmupLR(
            optimizer, self.schedule(total=int(self.trainer.estimated_stepping_batches))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is the label's; 0-d, in [0, 1]. Of mixed labels the
    larger part counts.
    """
    if labels.is_floating_point():  # batch x classes
        labels = labels.argmax(dim=1)
    return (logits.argmax(dim=1) == labels).float().mean()
