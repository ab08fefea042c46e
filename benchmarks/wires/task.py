"""What the study's runs learn: two digits side by side, as one of 100 classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.data.scans import (
    Images,
    augment,
    load_digits,  # and not `digits`, which imports Lightning
)
from recipes.data.split import stratified_split


def pairs_of_digits(count: int) -> dict[str, Images]:
    """``train`` of ``count`` images ``[1, 8, 16]``, ``val`` of an eighth of that, ``test`` of a
    quarter.

    Each is a pair of scans, augmented once each. Scans never cross the split. The same on every
    call.
    """
    images, labels = load_digits()
    train, test = stratified_split(labels, 0.25, seed=0)
    rest, val = stratified_split(labels[train], 0.25, seed=0)
    generator = torch.Generator().manual_seed(0)

    def pairs(part: Tensor, size: int) -> Images:
        left, right = part[torch.randint(len(part), (2, size), generator=generator)]
        both = torch.cat([augment(images[left], generator), augment(images[right], generator)], 3)
        return Images(both, 10 * labels[left] + labels[right])

    sizes = {
        "train": (train[rest], count),
        "val": (train[val], count // 8),
        "test": (test, count // 4),
    }
    return {name: pairs(part, size) for name, (part, size) in sizes.items()}


def network(hidden: int) -> nn.Module:
    """Images ``[batch, 1, 8, 16]`` to logits. Most of its bytes are in one matrix, as in many
    recognisers.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 32, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, 100),
    )
