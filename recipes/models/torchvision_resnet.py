"""torchvision's residual networks, initialised as large batches need it."""

from __future__ import annotations

import torchvision
from torch import nn


def torchvision_resnet(
    name: str, num_classes: int, in_channels: int = 3, zero_init_residual: bool = True
) -> torchvision.models.ResNet:
    """Images ``[batch, in_channels, height, width]`` to logits ``[batch, num_classes]``; random
    weights.

    Args:
        name: ``"resnet18"``, ``"resnet50"``, ...
        num_classes: Length of the logits.
        in_channels: 1 for grey images, 3 for colours.
        zero_init_residual: Start the last BatchNorm of each block at 0, so that each block starts
            as the identity (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
    """
    network = torchvision.models.get_model(
        name, num_classes=num_classes, zero_init_residual=zero_init_residual
    )
    if in_channels != 3:
        network.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        # as torchvision does
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    return network
