"""A residual network for images of a few pixels, where ResNet-18's stride-2 stem would leave
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385, figure 5 left)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Images ``[batch, in_channels, height, width]`` to logits ``[batch, num_classes]``.

    Each entry of ``widths`` is a stage of ``blocks`` residual blocks; every stage but the first
    halves the image.
    """

    def __init__(
        self, in_channels: int, num_classes: int, widths: Sequence[int], blocks: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv3x3(in_channels, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        stages: list[nn.Module] = []
        channels = widths[0]
        for index, width in enumerate(widths):
            for block in range(blocks):
                stages.append(
                    BasicBlock(channels, width, stride=2 if index > 0 and block == 0 else 1)
                )
                channels = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
