"""scikit-learn's bundled handwritten digits: 1,797 real scans of 8x8 pixels, no download."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ring.errors import ConfigurationError
from recipes.data.tensors import BatchedTensors, TensorImages, stratified_split


def load_digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 1, 8, 8]``, float32 in [0, 1], and labels ``[1797]``, int64.

    Raises `ConfigurationError`: scikit-learn, or the file that it bundles, is missing.
    """
    try:
        from sklearn import datasets

        pixels, labels = datasets.load_digits(return_X_y=True)
    except (ModuleNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"scikit-learn's digits cannot be read ({error}). Run: pip install --force-reinstall "
            "--no-deps scikit-learn"
        ) from error
    images = torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8)
    return images, torch.from_numpy(labels).long()


class Digits(TensorImages):
    """80 % of the digits to train on, 20 % to test on; validation images are taken from the 80 %.
    The split is the same for every run.
    """

    def load(self) -> dict[str, BatchedTensors]:
        images, labels = load_digits()
        return {
            name: BatchedTensors(images[part], labels[part]) for name, part in split(labels).items()
        }


def split(labels: Tensor) -> dict[str, Tensor]:
    """Indices of ``train``, ``val`` and ``test``."""
    train, test = stratified_split(labels, 0.2, seed=0)
    rest, val = stratified_split(labels[train], 0.1, seed=0)
    return {"train": train[rest], "val": train[val], "test": test}


class Images(NamedTuple):
    """Images ``[n, 1, 8, 8]`` and their labels ``[n]``."""

    images: Tensor
    labels: Tensor


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each turned by up to 20°, scaled by 15 %, shifted by up to a pixel, with noise of 0.1."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(len(images), generator=generator) * 2 - 1) * limit

    angle, scale = uniform(math.radians(20)), 1 + uniform(0.15)
    shift_x, shift_y = uniform(2 / 8), uniform(2 / 8)  # the image spans [-1, 1]
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = [torch.stack([cos, -sin, shift_x], 1), torch.stack([sin, cos, shift_y], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return (moved + 0.1 * torch.randn(moved.shape, generator=generator)).clamp_(0, 1)


def augmented_digits(copies: int) -> dict[str, Images]:
    """``train``, ``val`` and ``test``: ``copies`` augmented images of each scan, which never cross
    the recipe's split. The same on every call.
    """
    images, labels = load_digits()
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name, part in split(labels).items():
        repeated = part.repeat(copies)
        parts[name] = Images(augment(images[repeated], generator), labels[repeated])
    return parts
