"""Loaders of a small folder of images, with transforms."""

import random
from contextlib import contextmanager

import numpy as np
import torch

from lightning_ring.data import (
    RandomResizedCrop,
    ShuffledSampler,
    image_loader,
)


def make(folder, rank=0, world_size=1, batch_size=4, **options):
    sampler = ShuffledSampler(len(folder), seed=3, rank=rank, world_size=world_size)
    options = {"crop": RandomResizedCrop(32), "transform": None, "num_threads": 2, **options}
    return image_loader(folder, sampler, batch_size, **options)


def images(loader):
    return torch.cat([batch[0].clone() for batch in loader])


@contextmanager
def generators_untouched():
    def states():
        numpy = np.random.get_state()
        return random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    yield
    assert before == states()
