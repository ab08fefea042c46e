"""Images to embeddings: what a recogniser compares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from recipes.models.resnet import BasicBlock


class SmallEmbedder(nn.Module):
    """Images ``[batch, 3, height, width]`` to embeddings ``[batch, embedding_size]``, not
    normalised.

    A stem of stride 2, one residual block for each of ``widths`` (each but the first halves the
    image), the mean over positions, a linear layer. For images of some 64 pixels; torchvision's
    ResNets serve larger ones.
    """

    def __init__(self, widths: Sequence[int], embedding_size: int) -> None:
        super().__init__()
        stem = nn.Conv2d(3, widths[0], kernel_size=3, stride=2, padding=1, bias=False)
        blocks = [
            BasicBlock(narrow, wide, stride=1 if index == 0 else 2)
            for index, (narrow, wide) in enumerate(
                zip([widths[0], *widths[:-1]], widths, strict=True)
            )
        ]
        self.features = nn.Sequential(stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), *blocks)
        self.embedding = nn.Linear(widths[-1], embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.embedding(self.features(images).mean(dim=(2, 3)))
