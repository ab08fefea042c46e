"""What a run looks like, in TensorBoard: batches, confusions, and what is found for what."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure  # no pyplot: it would look for a display
from torch import Tensor
from torchmetrics.functional import confusion_matrix
from torchmetrics.utilities.plot import plot_confusion_matrix
from torchvision.utils import make_grid

from lightning_ring.retrieval import search

MOST_COUNTED = 20  # classes of a confusion matrix that has numbers in its cells
MOST_NAMES = 40  # of classes along an axis


class Pictures(Callback):
    """Rank 0 writes pictures of the images that it sees; on several ranks they are its part of all.

    In training: the first batch of each epoch in ``every``, as the model gets it, augmented. After
    each evaluation, from its first ``most`` images a loader:

    - of a model that classifies: the confusion matrix with the data module's ``class_names``; in
      validation after the first epoch and each ``every``-th;
    - of one that embeds: ``strips`` queries, each beside the five images nearest to it (green: its
      class; red: another).

    Args:
        images: Of a training batch.
        every: Epochs between two pictures of a training batch, and of the classes.
        most: Images of an evaluation to keep.
        strips: Queries shown with what they find.
    """

    def __init__(
        self, images: int = 32, every: int = 5, most: int = 1000, strips: int = 12
    ) -> None:
        self.images, self.every, self.most, self.strips = images, every, most, strips
        self.seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    # -- training

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        writer = _writer(trainer)
        if writer is not None and batch_idx == 0 and trainer.current_epoch % self.every == 0:
            grid = make_grid(shown(batch[0][: self.images]), nrow=8)
            writer.add_image("train/batch", grid, trainer.global_step)

    # -- evaluation

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *position: int
    ) -> None:
        loader = position[1] if len(position) > 1 else 0
        kept = self.seen.setdefault(loader, [])
        full = sum(len(part[1]) for part in kept) >= self.most
        if loader > 1 or full or _writer(trainer) is None:  # a third loader's are to be found
            return
        images, labels = batch[:2]
        with torch.no_grad():
            found = getattr(pl_module, "embedder", pl_module)(images)
        kept.append((shown(images), labels.cpu(), found.float().cpu()))

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        writer, epoch = _writer(trainer), trainer.current_epoch
        stage = "test" if trainer.testing else "val"
        # A figure takes 0.4 s.
        draws_classes = stage == "test" or epoch == 0 or (epoch + 1) % self.every == 0
        for loader, parts in self.seen.items():
            if writer is None or not parts:
                continue
            images, labels, outputs = (torch.cat(column) for column in zip(*parts, strict=True))
            name = stage if loader == 0 else f"{stage}_unseen"
            logits: Tensor | None = outputs
            if hasattr(pl_module, "embedder"):
                picture = strips(images, labels, F.normalize(outputs), self.strips)
                writer.add_image(f"{name}/nearest", picture, trainer.global_step)
                logits = None
                if pl_module.classification_weight and loader == 0:
                    with torch.no_grad():
                        logits = pl_module.logits(outputs.to(pl_module.device)).float().cpu()
            if draws_classes and logits is not None:
                self._classified(trainer, name, labels, logits)
        self.seen.clear()

    on_test_epoch_end = on_validation_epoch_end

    def _classified(self, trainer: L.Trainer, name: str, labels: Tensor, logits: Tensor) -> None:
        step, predicted = trainer.global_step, logits.argmax(1)
        names = getattr(trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
        classes = names or [str(label) for label in range(logits.shape[1])]
        right = int((predicted == labels).sum())
        where = ", on rank 0" if trainer.world_size > 1 else ""
        title = f"{name}, step {step}: {right} of {len(labels)} images right{where}"
        picture = confusion(predicted, labels, classes, title)
        _writer(trainer).add_figure(f"{name}/confusion", picture, step)


def shown(images: Tensor) -> Tensor:
    """Normalised images ``[batch, channels, height, width]`` stretched to [0, 1], each by its
    own range, on the CPU.
    """
    images = images.detach().float().cpu()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return (images - low) / (high - low).clamp_min(1e-6)


def confusion(predicted: Tensor, labels: Tensor, names: Sequence[str], title: str = "") -> Figure:
    """A row a class, a column what it was taken for: shares, as numbers for up to 20 classes."""
    num = len(names)
    shares = confusion_matrix(predicted, labels, "multiclass", num_classes=num, normalize="true")
    every = -(-num // MOST_NAMES)
    named = [name if number % every == 0 else "" for number, name in enumerate(names)]
    figure = Figure(figsize=(7, 6.5), dpi=100, layout="constrained")
    axes = figure.add_subplot(title=title)
    plot_confusion_matrix(shares, axes, add_text=num <= MOST_COUNTED, labels=named, cmap="Blues")
    return figure


def strips(images: Tensor, labels: Tensor, embeddings: Tensor, num: int, k: int = 5) -> Tensor:
    """``[3, height, width]``: a row a query and the ``k`` images nearest to it, framed by
    whether they are right.
    """
    queries = torch.linspace(0, len(labels) - 1, min(num, len(labels))).long()
    _, found = search(embeddings[queries], embeddings, min(k, len(labels) - 1), exclude=queries)
    rows: list[Tensor] = []
    for query, others in zip(queries.tolist(), found.tolist(), strict=True):
        rows.append(framed(images[query], (1.0, 1.0, 1.0)))
        for other in others:
            right = labels[other] == labels[query]
            rows.append(framed(images[other], (0.0, 0.8, 0.0) if right else (0.9, 0.0, 0.0)))
    return make_grid(torch.stack(rows), nrow=1 + found.shape[1], padding=3)


def framed(image: Tensor, colour: Sequence[float], width: int = 3) -> Tensor:
    """``image`` as ``[3, height, width]`` with a frame around it."""
    height, across = image.shape[1] + 2 * width, image.shape[2] + 2 * width
    side = torch.tensor(colour).view(3, 1, 1).repeat(1, height, across)
    side[:, width:-width, width:-width] = image
    return side


def _writer(trainer: L.Trainer) -> Any:
    """TensorBoard's writer on rank 0, where there is one."""
    if not trainer.is_global_zero:
        return None
    loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    return loggers[0].experiment if loggers else None
