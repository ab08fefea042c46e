"""scikit-learn's bundled handwritten digits: 1,797 real scans of 8x8 pixels, no download."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.errors import ConfigurationError
from recipes.data.tensors import BatchedTensors, TensorImages, stratified_split


def load_digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 1, 8, 8]``, float32 in [0, 1], and labels ``[1797]``, int64.

    Raises:
        ConfigurationError: scikit-learn, or the file that it bundles, is missing.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "The digits come with scikit-learn, which is not installed. Run: pip install 'lightning-ring[recipes]'"
        ) from error
    try:
        pixels, labels = datasets.load_digits(return_X_y=True)
    except OSError as error:
        raise ConfigurationError(
            f"scikit-learn's digits cannot be read from {datasets.__path__[0]}/data ({error}). "
            "Run: pip install --force-reinstall --no-deps scikit-learn"
        ) from error
    return torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8), torch.from_numpy(labels).long()


class Digits(TensorImages):
    """80 % of the digits to train on, 20 % to test on; validation images are taken from the 80 %.

    Args:
        batch_size: Images of one step over all ranks.
        test_fraction: Share of all images kept for the test.
        val_fraction: Share of the remaining images that choose the best checkpoint.
        split_seed: Makes the split; independent of the seed of a run, so that runs share their test images.
    """

    def __init__(
        self, batch_size: int, test_fraction: float = 0.2, val_fraction: float = 0.1, split_seed: int = 0
    ) -> None:
        super().__init__(batch_size)
        self.test_fraction = test_fraction
        self.val_fraction = val_fraction
        self.split_seed = split_seed

    def load(self) -> dict[str, BatchedTensors]:
        images, labels = load_digits()
        train, test = stratified_split(labels, self.test_fraction, self.split_seed)
        rest, val = stratified_split(labels[train], self.val_fraction, self.split_seed)
        parts = {"train": train[rest], "val": train[val], "test": test}
        return {name: BatchedTensors(images[part], labels[part]) for name, part in parts.items()}
