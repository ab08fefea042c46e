"""A recogniser as a LightningModule: embeddings trained by classification and triplets, judged by retrieval."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.retrieval import NothingToFindError, retrieval_metrics
from lightning_ring.schedules import WarmupLR

Batch = tuple[Tensor, Tensor, Tensor]
"""Images ``[batch, 3, height, width]``, classes ``[batch]``, and each image's position in its data set ``[batch]``."""


class Recogniser(L.LightningModule):
    """Trains ``embedder`` with a classification head, a batch-hard triplet loss, or both.

    Classification sees the embedding through a BatchNorm without weights that triplets do not (Luo et al., "Bag of
    tricks", CVPRW 2019, section 3.5: the two losses want different geometries). Triplets take, for each image, the
    farthest of its class and the nearest of another (Hermans, Beyer, Leibe 2017, arXiv:1703.07737, equation 5).

    Args:
        embedder: Module from images to embeddings ``[batch, embedding_size]``.
        embedding_size: Length of an embedding.
        num_classes: Classes trained on.
        optimizer, schedule: As in `recipes.classifier.Classifier`.
        classification_weight, triplet_weight: What each loss counts; 0 leaves it out.
        margin: By how much the other class has to be farther away; distances of unit vectors lie in [0, 2].
        label_smoothing: Of the classification loss.
        gather_embeddings: Look for triplets among the images of all ranks, with gradients through the exchange. Off,
            each rank looks among its own.
    """

    def __init__(
        self,
        embedder: nn.Module,
        embedding_size: int,
        num_classes: int,
        optimizer: partial[Optimizer],
        schedule: Callable[..., Callable[[int], float]] | None = None,
        classification_weight: float = 1.0,
        triplet_weight: float = 1.0,
        margin: float = 0.3,
        label_smoothing: float = 0.1,
        gather_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if min(classification_weight, triplet_weight) < 0 or classification_weight + triplet_weight == 0:
            raise ValueError(
                f"classification_weight={classification_weight} and triplet_weight={triplet_weight}: neither may be "
                "negative, and one must be positive."
            )
        self.embedder = embedder
        self.neck = nn.BatchNorm1d(embedding_size, affine=False)
        self.head = nn.Linear(embedding_size, num_classes)
        self.optimizer = optimizer
        self.schedule = schedule
        self.classification_weight = classification_weight
        self.triplet_weight = triplet_weight
        self.label_smoothing = label_smoothing
        self.gather_embeddings = gather_embeddings
        distance = LpDistance(normalize_embeddings=True)
        self.hardest = BatchHardMiner(distance=distance)
        # the mean over all anchors, so that the mean over ranks is the mean over the whole batch
        self.triplet_loss = TripletMarginLoss(margin=margin, distance=distance, reducer=MeanReducer())
        self.seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings of unit length ``[batch, embedding_size]``."""
        return F.normalize(self.embedder(images))

    def logits(self, embeddings: Tensor) -> Tensor:
        return self.head(self.neck(embeddings))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels, _ = batch
        embeddings = self.embedder(images)
        loss = embeddings.new_zeros(())
        if self.classification_weight:
            logits = self.logits(embeddings)
            classification = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
            loss = loss + self.classification_weight * classification
            self.log("train/classification_loss", classification.detach())
            self.log("train/accuracy", (logits.argmax(1) == labels).float().mean())
        if self.triplet_weight:
            triplet = self.triplets(embeddings, labels)
            loss = loss + self.triplet_weight * triplet
            self.log("train/triplet_loss", triplet.detach())
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def triplets(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean batch-hard triplet loss of this rank's images; 0 where no image has another of its class."""
        if self.gather_embeddings and self.trainer.world_size > 1:
            others = torch.cat(list(self.all_gather(embeddings, sync_grads=True)))
            other_labels = torch.cat(list(self.all_gather(labels)))
        else:
            others, other_labels = embeddings, labels
        found = self.hardest(embeddings, labels, others, other_labels)
        return self.triplet_loss(embeddings, labels, found, others, other_labels)

    # -- evaluation

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.remember(batch, dataloader_idx)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.remember(batch, dataloader_idx)

    def remember(self, batch: Batch, dataloader_idx: int) -> None:
        images, labels, indices = batch
        self.seen.setdefault(dataloader_idx, []).append((self.embedder(images), labels, indices))

    def on_validation_epoch_end(self) -> None:
        self.report("val")

    def on_test_epoch_end(self) -> None:
        self.report("test")

    def report(self, stage: str) -> None:
        """Log what the evaluation's embeddings retrieve, each loader's items among themselves.

        The first loader holds classes that were trained on: there the classification head is judged too, over all of
        them and over the third with the fewest training images. Further ones hold classes never seen.
        """
        for dataloader_idx, parts in sorted(self.seen.items()):
            embeddings, labels, indices = (torch.cat(column) for column in zip(*parts, strict=True))
            name = stage if dataloader_idx == 0 else f"{stage}_unseen"
            for metric, value in self.retrieve(embeddings, labels, indices, name).items():
                self.log(f"{name}/{metric}", value, sync_dist=True, prog_bar=metric == "R@1")
            if dataloader_idx == 0 and self.classification_weight:
                self.report_accuracy(name, embeddings, labels)
        self.seen.clear()

    def retrieve(self, embeddings: Tensor, labels: Tensor, indices: Tensor, name: str) -> dict[str, float]:
        """Metrics of retrieval by name; none, with a warning, where nothing has a match, as in a few batches."""
        try:
            found = retrieval_metrics(
                embeddings,
                labels,
                indices,
                rank=self.trainer.global_rank,
                world_size=self.trainer.world_size,
                all_gather=lambda tensor: list(self.all_gather(tensor)),
            )
        except NothingToFindError as error:
            if not self.trainer.sanity_checking:
                rank_zero_warn(
                    f"{name}/R@1, MAP@R and the like are left out of this evaluation ({error}). Give it two images of "
                    "some class: more batches, or another split."
                )
            return {}
        return found.as_dict()

    def report_accuracy(self, name: str, embeddings: Tensor, labels: Tensor) -> None:
        right = (self.logits(embeddings).argmax(1) == labels).double()
        rare = torch.isin(labels, self.rare_classes().to(labels))
        sums = torch.stack([right.sum(), right.new_tensor(len(right)), right[rare].sum(), rare.sum().double()])
        total = self.trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.log(f"{name}/accuracy", total[0] / total[1], sync_dist=True)
        if total[3] > 0:
            self.log(f"{name}/accuracy_rare", total[2] / total[3], sync_dist=True)

    def rare_classes(self) -> Tensor:
        """The third of the classes with the fewest training images; none where the data module counts none."""
        counts = getattr(getattr(self.trainer, "datamodule", None), "class_counts", None)
        return torch.as_tensor(counts).argsort()[: len(counts) // 3] if counts is not None else torch.empty(0)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        weight_decay = self.optimizer.keywords.get("weight_decay", 0.0)
        optimizer = self.optimizer(exclude_bias_and_norm(self, weight_decay))
        if self.schedule is None:
            return optimizer
        scheduler = WarmupLR(optimizer, self.schedule(total=int(self.trainer.estimated_stepping_batches)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
