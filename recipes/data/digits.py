"""scikit-learn's digits for training: split, in batches of all ranks."""

from __future__ import annotations

from recipes.data.scans import load_digits
from recipes.data.split import stratified_split
from recipes.data.tensors import BatchedTensors, TensorImages


class Digits(TensorImages):
    """80 % of the digits to train on, 20 % to test on; validation images are taken from the 80 %.

    Args:
        batch_size: Images of one step over all ranks.
        test_fraction: Share of all images kept for the test.
        val_fraction: Share of the remaining images that choose the best checkpoint.
        split_seed: Makes the split; independent of the seed of a run, so that runs share their test
            images.
    """

    def __init__(
        self,
        batch_size: int,
        test_fraction: float = 0.2,
        val_fraction: float = 0.1,
        split_seed: int = 0,
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
