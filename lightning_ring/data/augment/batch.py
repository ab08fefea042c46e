"""Transforms of a batch, such as MixUp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ring.data.augment.generators import seed_process
from lightning_ring.data.augment.sample import Transform, name_of
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.random_state import remember_random_state


def transform_batch(
    transform: Transform, images: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """``transform(images, labels)``, which draws from the process's generators as ``seed`` says.

    They are as before when it returns: Python's, NumPy's, torch's, and every GPU's.

    Args:
        images: batch x 3 x height x width, on the device.
        labels: batch, integers.

    Raises:
        ConfigurationError: It made no images and labels of as many samples.
    """
    restore = remember_random_state()
    try:
        seed_process(seed)
        torch.manual_seed(seed)  # of GPUs too
        with torch.no_grad():
            made = transform(images, labels)
    finally:
        restore()
    _check(made, transform, len(images))
    return made[0], made[1]


def _check(made: Any, transform: Transform, num: int) -> None:
    pair = (
        isinstance(made, (tuple, list))
        and len(made) == 2
        and all(isinstance(part, Tensor) for part in made)
    )
    if pair and [len(part) for part in made] == [num, num]:
        return
    found = (
        f"{len(made[0])} images and {len(made[1])} labels" if pair else f"a {type(made).__name__}"
    )
    raise ConfigurationError(
        f"batch_transform {name_of(transform)} made {found} of {num} images and labels, expected "
        "(images, labels), as many as it got. A transform of images alone fits as lambda images, "
        "labels: (transform(images), labels)."
    )
