"""A convolutional network small enough to train hundreds of times."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def small_cnn(in_channels: int, num_classes: int, widths: Sequence[int]) -> nn.Sequential:
    """Images ``[batch, in_channels, 8, 8]`` to logits: a 3x3 convolution, BatchNorm and ReLU for
    each of ``widths``.

    Every convolution but the first halves the image.
    """
    layers: list[nn.Module] = []
    size = 8
    for index, width in enumerate(widths):
        stride = 2 if index else 1
        size //= stride
        layers += [
            nn.Conv2d(in_channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        in_channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(in_channels * size * size, num_classes))
