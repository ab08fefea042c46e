"""A recogniser as a LightningModule: embeddings trained by classification and metric losses,
judged by retrieval.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.retrieval.metrics import Items
from lightning_ring.schedules import WarmupLR
from recipes.from_configuration import FromConfiguration
from recipes.recognition.judging import Ranks, judged
from recipes.recognition.sharded_head import KEY, ShardedHead
from recipes.recognition.strategy import check_strategy

Batch = tuple[Tensor, Tensor, Tensor]
"""Images ``[batch, 3, height, width]``, classes ``[batch]``, and each image's position in its data
set ``[batch]``."""

# the loaders of the test; further images are found, but ask nothing
SEEN, UNSEEN, FURTHER = 0, 1, 2


class Recogniser(FromConfiguration):
    """Trains ``embedder`` with a classification head, a metric loss, or both.

    Classification sees the embedding through a BatchNorm without weights that the metric loss does
    not (Luo et al., "Bag of tricks", CVPRW 2019, section 3.5: the two losses want different
    geometries).

    Args:
        embedder: Module from images to embeddings ``[batch, embedding_size]``.
        embedding_size: Length of an embedding.
        num_classes: Classes trained on.
        optimizer, schedule: As in `recipes.classifier.Classifier`.
        metric_loss: Module from embeddings and labels to their mean loss, such as `MetricLoss` or
            `ShardedHead`.
        classification_weight, metric_weight: What each loss counts; 0 leaves it out.
        label_smoothing: Of the classification loss.
        gather_embeddings: The metric loss sees the embeddings of all ranks, with gradients, and is
            that of one process on the whole batch. Off, each rank looks at its own. A `ShardedHead`
            always sees all.
    """

    def __init__(
        self,
        embedder: nn.Module,
        embedding_size: int,
        num_classes: int,
        optimizer: partial[Optimizer],
        schedule: Callable[..., Callable[[int], float]] | None = None,
        metric_loss: nn.Module | None = None,
        classification_weight: float = 1.0,
        metric_weight: float = 1.0,
        label_smoothing: float = 0.1,
        gather_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if metric_loss is None:
            metric_weight = 0.0
        if (
            min(classification_weight, metric_weight) < 0
            or classification_weight + metric_weight == 0
        ):
            raise ValueError(
                f"classification_weight={classification_weight} and metric_weight={metric_weight} "
                f"(of {type(metric_loss).__name__}): neither may be negative, and one must be "
                "positive."
            )
        self.embedder = embedder
        self.neck = nn.BatchNorm1d(embedding_size, affine=False)
        self.head = nn.Linear(embedding_size, num_classes) if classification_weight else None
        self.metric_loss = metric_loss if metric_weight else None
        self.optimizer = optimizer
        self.schedule = schedule
        self.num_classes = num_classes
        self.classification_weight = classification_weight
        self.metric_weight = metric_weight
        self.label_smoothing = label_smoothing
        self.gather_embeddings = gather_embeddings
        self.seen: dict[int, list[tuple[Tensor, ...]]] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings of unit length ``[batch, embedding_size]``."""
        return F.normalize(self.embedder(images))

    def logits(self, embeddings: Tensor) -> Tensor:
        assert self.head is not None, "there is no classification"
        return self.head(self.neck(embeddings))

    def setup(self, stage: str) -> None:
        check_strategy(
            self.trainer,
            gathers=self.gather_embeddings,
            sharded=self.sharded_head is not None,
            remembers=getattr(self.metric_loss, "memory", 0) > 0,
            stage=stage,
        )
        if self.sharded_head is not None:
            several = self.trainer.world_size > 1
            comm = self.trainer.strategy.communicator if several else None  # type: ignore[attr-defined]
            self.sharded_head.join(comm, self.trainer.strategy.root_device)

    @property
    def sharded_head(self) -> ShardedHead | None:
        return self.metric_loss if isinstance(self.metric_loss, ShardedHead) else None

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
        if self.metric_loss is not None:
            metric = self.metric_loss(*self.compared(embeddings, labels))
            loss = loss + self.metric_weight * metric
            self.log("train/metric_loss", metric.detach())
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def compared(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings and labels that the metric loss sees.

        Those of all ranks, with ``gather_embeddings``: then every rank computes the loss of the
        whole batch, and differentiates it by its own embeddings. Their gradient is times the number
        of ranks, because the strategy takes the mean over ranks; that of the loss's own weights is
        the same on all of them.
        """
        ranks = self.trainer.world_size
        if not self.gather_embeddings or self.sharded_head is not None or ranks == 1:
            return embeddings, labels
        constant = embeddings.detach()
        rows = list(self.all_gather(constant))
        rows[self.trainer.global_rank] = constant + ranks * (embeddings - constant)
        return torch.cat(rows), torch.cat(list(self.all_gather(labels)))

    # -- the sharded head's optimizer and checkpoints

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.sharded_head is not None:
            self.sharded_head.step(optimizer.param_groups[0]["lr"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.sharded_head is not None:
            checkpoint[KEY] = self.sharded_head.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.sharded_head is None:
            return
        if KEY not in checkpoint:
            raise ConfigurationError(
                "the checkpoint holds no sharded head: it was trained with another loss."
            )
        self.sharded_head.load(checkpoint[KEY])

    # -- evaluation

    def on_validation_epoch_start(self) -> None:
        # an evaluation that was cut short, or is made again after a death, has left some
        self.seen.clear()

    def on_test_epoch_start(self) -> None:
        self.seen.clear()

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
        """Log what the evaluation's embeddings retrieve (`judged`).

        The first loader holds classes that were trained on: there the classification head is judged
        too, over all of them and over the third with the fewest training images. The second one
        holds classes never seen, a third one images that are found, but ask nothing.
        """
        columns = {
            loader: [torch.cat(c) for c in zip(*parts, strict=True)]
            for loader, parts in self.seen.items()
        }
        self.seen.clear()
        if self.classification_weight or self.sharded_head is not None:
            self.report_accuracy(stage, *columns[SEEN][:2])
        items = {loader: self.distinct(column, loader) for loader, column in columns.items()}
        further = items.pop(FURTHER, None)
        sets = {
            stage if loader == SEEN else f"{stage}_unseen": part
            for loader, part in sorted(items.items())
        }
        for name, value in self.judge(sets, further).items():
            self.log(name, value, sync_dist=True, prog_bar=name == f"{stage}/R@1")

    def distinct(self, columns: list[Tensor], loader: int) -> Items:
        """Labels and indices stand for one class and one image in all loaders together."""
        embeddings, labels, indices = columns
        apart = self.num_classes if loader == UNSEEN else 0
        return embeddings, labels + apart, indices + (loader << 48)

    def judge(self, sets: dict[str, Items], further: Items | None) -> dict[str, float]:
        ranks = Ranks(
            self.trainer.global_rank,
            self.trainer.world_size,
            lambda tensor: list(self.all_gather(tensor)),
        )
        return judged(sets, further, ranks, warn=not self.trainer.sanity_checking)

    def report_accuracy(self, name: str, embeddings: Tensor, labels: Tensor) -> None:
        sharded = self.sharded_head
        predicted = (
            sharded.predict(embeddings)
            if sharded is not None
            else self.logits(embeddings).argmax(1)
        )
        right = (predicted == labels).double()
        rare = torch.isin(labels, self.rare_classes().to(labels))
        sums = torch.stack(
            [right.sum(), right.new_tensor(len(right)), right[rare].sum(), rare.sum().double()]
        )
        total = self.trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.log(f"{name}/accuracy", total[0] / total[1], sync_dist=True)
        if total[3] > 0:
            self.log(f"{name}/accuracy_rare", total[2] / total[3], sync_dist=True)

    def rare_classes(self) -> Tensor:
        """The third of the classes with the fewest training images; none where the data module
        counts none.
        """
        counts = getattr(getattr(self.trainer, "datamodule", None), "class_counts", None)
        return (
            torch.as_tensor(counts).argsort(stable=True)[: len(counts) // 3]
            if counts is not None
            else torch.empty(0)
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        weight_decay = self.optimizer.keywords.get("weight_decay", 0.0)
        optimizer = self.optimizer(exclude_bias_and_norm(self, weight_decay))
        if self.sharded_head is not None:
            self.sharded_head.set_optimizer(self.optimizer)
        if self.schedule is None:
            return optimizer
        scheduler = WarmupLR(
            optimizer, self.schedule(total=int(self.trainer.estimated_stepping_batches))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
