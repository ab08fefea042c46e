"""Loaders of a small folder of images, with transforms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ring.data import (
    ImageFolder,
    Loader,
    RandomResizedCrop,
    ShuffledSampler,
    image_loader,
)


def make(
    folder: ImageFolder, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any
) -> Loader:
    sampler = ShuffledSampler(len(folder), seed=3, rank=rank, world_size=world_size)
    options = {"crop": RandomResizedCrop(32), "transform": None, "num_threads": 2, **options}
    return image_loader(folder, sampler, batch_size, **options)


def images(loader: Loader) -> Tensor:
    return torch.cat([batch[0].clone() for batch in loader])


@contextmanager
def generators_untouched() -> Iterator[None]:
    def states() -> Any:
        numpy: Any = np.random.get_state()
        return random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    yield
    assert before == states()
