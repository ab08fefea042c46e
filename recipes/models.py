"""The networks: small ones for images of a few pixels, and torchvision's."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def small_cnn(in_channels: int, num_classes: int, widths: Sequence[int]) -> nn.Sequential:
    """Images ``[batch, in_channels, 8, 8]`` to logits: a 3x3 convolution, BatchNorm and ReLU for
    each of ``widths``. Small enough to be trained hundreds of times.

    Every convolution but the first halves the image.
    """
    layers: list[nn.Module] = []
    size = 8
    for index, width in enumerate(widths):
        stride = 2 if index else 1
        size //= stride
        layers += [conv3x3(in_channels, width, stride), nn.BatchNorm2d(width), nn.ReLU()]
        in_channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(in_channels * size * size, num_classes))


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
    """Images ``[batch, in_channels, height, width]`` to logits or an embedding ``[batch,
    num_classes]``: a residual network for images of which ResNet-18's stem would leave nothing.

    Each entry of ``widths`` is a stage of ``blocks`` residual blocks; every stage but the first
    halves the image, and so does a stem of stride 2.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: Sequence[int],
        blocks: int = 1,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        stem = conv3x3(in_channels, widths[0], stem_stride)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(widths[0]), nn.ReLU())
        stages: list[nn.Module] = []
        channels = widths[0]
        for index, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if index > 0 and block == 0 else 1
                stages.append(BasicBlock(channels, width, stride))
                channels = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


def torchvision_resnet(name: str, num_classes: int, in_channels: int = 3) -> nn.Module:
    """torchvision's ``"resnet18"``, ``"resnet50"``, ... with random weights; ``in_channels`` is 1
    for grey images.

    The last BatchNorm of each block starts at 0, so that each block starts as the identity (Goyal
    et al. 2017, arXiv:1706.02677, section 5.1).
    """
    from torchvision.models import get_model

    network: nn.Module = get_model(name, num_classes=num_classes, zero_init_residual=True)
    if in_channels != 3:
        network.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        # as torchvision does
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    return network
