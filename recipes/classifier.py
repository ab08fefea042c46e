"""Image classification as a LightningModule: any network, any optimizer, any schedule."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, SumMetric

from recipes.from_configuration import FromConfiguration


class Classifier(FromConfiguration):
    """Trains ``network`` (images to logits) with cross-entropy.

    Args:
        network: Module from images ``[batch, channels, height, width]`` to logits ``[batch,
            num_classes]``.
        optimizer, schedule: As in `FromConfiguration`.
        label_smoothing: Of the training loss (Szegedy et al. 2015, arXiv:1512.00567, section 7).
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: partial[Optimizer],
        schedule: Callable[..., Callable[[int], float]] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(optimizer, schedule)
        self.network = network
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


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is the label's; 0-d, in [0, 1]."""
    return (logits.argmax(dim=1) == labels).float().mean()
