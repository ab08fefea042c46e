"""A recogniser as a LightningModule: embeddings trained by classification and metric losses,
judged by retrieval.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError
from lightning_ring.retrieval import Items, NothingToFindError, retrieval_metrics
from recipes.from_configuration import FromConfiguration
from recipes.recognition.sharded_head import KEY, ShardedHead

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
        optimizer, schedule: As in `FromConfiguration`.
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
        super().__init__(optimizer, schedule)
        if metric_loss is None:
            metric_weight = 0.0
        weights = classification_weight, metric_weight
        if min(weights) < 0 or max(weights) == 0:
            raise ValueError(
                f"classification_weight={classification_weight} and metric_weight={metric_weight} "
                f"(of {type(metric_loss).__name__}): neither may be negative, and one must be "
                "positive."
            )
        self.embedder = embedder
        self.neck = nn.BatchNorm1d(embedding_size, affine=False)
        self.head = nn.Linear(embedding_size, num_classes) if classification_weight else None
        self.metric_loss = metric_loss if metric_weight else None
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
        strategy, several = self.trainer.strategy, self.trainer.world_size > 1
        if (reason := refused(self, self.trainer, stage)) is not None:
            raise ConfigurationError(reason)
        if self.sharded_head is not None:
            comm = strategy.communicator if several else None  # type: ignore[attr-defined]
            self.sharded_head.join(comm, strategy.root_device)

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
        if self.sharded_head is not None:
            self.sharded_head.load(checkpoint[KEY])

    # -- evaluation

    def on_validation_epoch_start(self) -> None:
        # an evaluation that was cut short, or is made again after a death, has left some
        self.seen.clear()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels, indices = batch
        self.seen.setdefault(dataloader_idx, []).append((self.embedder(images), labels, indices))

    def on_validation_epoch_end(self) -> None:
        self.report("val")

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    def on_test_epoch_end(self) -> None:
        self.report("test")

    def report(self, stage: str) -> None:
        """Log what the evaluation's embeddings retrieve.

        The first loader holds classes that were trained on: there the classification head is judged
        too. The second one holds classes never seen, a third one images that are found, but ask
        nothing.

        ``STAGE/R@1`` and the like are of a loader's images among themselves; with two loaders or
        more, ``STAGE_in_all/R@1`` is of those among the images of all loaders.
        """
        columns = {
            loader: [torch.cat(column) for column in zip(*parts, strict=True)]
            for loader, parts in sorted(self.seen.items())
        }
        self.seen.clear()
        if self.classification_weight or self.sharded_head is not None:
            self.report_accuracy(stage, *columns[SEEN][:2])
        items = {loader: self.distinct(column, loader) for loader, column in columns.items()}
        everything: Items = tuple(map(torch.cat, zip(*items.values(), strict=True)))  # type: ignore[assignment]
        for loader, asking in items.items():
            if loader == FURTHER:
                continue
            name = stage if loader == SEEN else f"{stage}_unseen"
            self.report_retrieval(name, asking, None)
            if UNSEEN in items:
                self.report_retrieval(f"{name}_in_all", asking, everything)

    def distinct(self, columns: list[Tensor], loader: int) -> Items:
        """Labels and indices stand for one class and one image in all loaders together."""
        embeddings, labels, indices = columns
        apart = self.num_classes if loader == UNSEEN else 0
        return embeddings, labels + apart, indices + (loader << 48)

    def gather_list(self, tensor: Tensor) -> list[Tensor]:
        return list(self.all_gather(tensor))

    def report_retrieval(self, name: str, items: Items, gallery: Items | None) -> None:
        """Log ``NAME/R@1`` and the like; nothing, with a warning, where nothing has a match, as in
        a few batches.
        """
        try:
            metrics = retrieval_metrics(
                *items,
                gallery=gallery,
                rank=self.trainer.global_rank,
                all_gather=self.gather_list if self.trainer.world_size > 1 else None,
            )
        except NothingToFindError as error:
            if not self.trainer.sanity_checking:
                rank_zero_warn(
                    f"{name}/R@1, MAP@R and the like are left out of this evaluation ({error}). "
                    "Give it two images of some class: more batches, or another split."
                )
            return
        for metric, value in metrics.as_dict().items():
            self.log(f"{name}/{metric}", value, sync_dist=True, prog_bar=metric == "R@1")

    def report_accuracy(self, stage: str, embeddings: Tensor, labels: Tensor) -> None:
        if self.sharded_head is not None:
            predicted = self.sharded_head.predict(embeddings)
        else:
            predicted = self.logits(embeddings).argmax(1)
        right = (predicted == labels).double()
        sums = torch.stack([right.sum(), right.new_tensor(len(right))])
        total = self.trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        self.log(f"{stage}/accuracy", total[0] / total[1], sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        if self.sharded_head is not None:
            self.sharded_head.set_optimizer(self.optimizer)
        return super().configure_optimizers()


def refused(model: Recogniser, trainer: L.Trainer, stage: str) -> str | None:
    """Why this would silently train something else than one process on the whole batch, and what
    to do instead.
    """
    fits, sharded = stage == "fit", model.sharded_head is not None
    if fits and sharded and trainer.gradient_clip_val:
        return (
            f"trainer.gradient_clip_val={trainer.gradient_clip_val} would clip the embedder's "
            "gradients alone, and not those of the sharded head. Leave it out."
        )
    if fits and sharded and getattr(trainer.precision_plugin, "scaler", None) is not None:
        return (
            f"trainer.precision={trainer.precision} scales the loss, and the sharded head's step "
            "would not undo it. Use bf16-mixed or 32-true."
        )
    if trainer.world_size == 1:
        return None
    if fits and getattr(model.metric_loss, "memory", 0) > 0 and not model.gather_embeddings:
        return (
            "a memory of earlier batches is a buffer, of which all ranks get rank 0's: the other "
            "ranks' images would be forgotten. Set model.gather_embeddings=true, or loss.memory=0."
        )
    options = getattr(trainer.strategy, "options", None)
    if sharded and (options is None or getattr(trainer.strategy, "communicator", None) is None):
        return (
            "the sharded head exchanges logits through lightning_ring, but the strategy is "
            f"{type(trainer.strategy).__name__}. Use strategy=ring or strategy=ring_sharded."
        )
    if options is None or not (sharded or model.gather_embeddings):
        return None
    elastic = getattr(trainer.strategy, "strategy_name", "") == "ring_elastic"
    if elastic or options.uneven == "join" or (fits and options.new_algorithm().steps_alone):
        what = "the sharded head" if sharded else "gather_embeddings=true"
        return (
            f"{what} needs batches and gradients of all ranks at each step. Elastic jobs, "
            "uneven=join and algorithms whose ranks step alone do not have them. Use strategy=ring "
            "strategy.uneven=error, or strategy=ring_sharded."
        )
    return None
