"""Models that learned nothing, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

NAME = "tests.retrieval.photos.models:Embedder"


class Embedder(L.LightningModule):
    """Images of any size to embeddings."""

    def __init__(self, embedding_size: int, fill: float | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Conv2d(3, embedding_size, 5, stride=3), nn.Tanh(), nn.AdaptiveAvgPool2d(2))
        if fill is not None:
            nn.init.constant_(self.layers[0].weight, fill)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)


class OfOneSize(Embedder):
    """Images of 32 x 32 pixels to embeddings."""

    def __init__(self, embedding_size: int) -> None:
        super().__init__(embedding_size)
        self.last = nn.Linear(3 * 32 * 32, embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(images.flatten(1))


class Maps(Embedder):
    """Images to feature maps, which are no embeddings."""

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Standardising(Embedder):
    """Each image is divided by its standard deviation: one of a single colour has no embedding."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images / images.std(dim=(2, 3), keepdim=True))


def save(file: Path, model: L.LightningModule | None = None, seed: int = 0, **changes: Any) -> Path:
    """As Lightning's Trainer saves ``model``; ``changes`` of the checkpoint's top level."""
    torch.manual_seed(seed)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model or Embedder(16))
    trainer.save_checkpoint(file)
    if changes:
        torch.save(torch.load(file) | changes, file)
    return file
