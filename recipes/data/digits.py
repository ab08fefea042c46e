"""scikit-learn's bundled handwritten digits: 1,797 real scans of 8x8 pixels, no download."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring.errors import ConfigurationError
from recipes.data.exact import ExactSampler, even_batch_size, per_rank_batch_size


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


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the rest and of a random ``fraction`` of every class, both sorted. Depends on the arguments only."""
    generator = torch.Generator().manual_seed(seed)
    picked = []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        picked.append(members[order[: round(fraction * len(members))]])
    chosen = torch.cat(picked).sort().values
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    return rest.nonzero().flatten(), chosen


class Digits(L.LightningDataModule):
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
        super().__init__()
        self.batch_size = batch_size
        self.test_fraction = test_fraction
        self.val_fraction = val_fraction
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        images, labels = load_digits()
        train, test = stratified_split(labels, self.test_fraction, self.split_seed)
        rest, val = stratified_split(labels[train], self.val_fraction, self.split_seed)
        parts = {"train": train[rest], "val": train[val], "test": test}
        self.datasets = {name: TensorDataset(images[part], labels[part]) for name, part in parts.items()}

    def train_dataloader(self) -> DataLoader:
        num_images = len(self.datasets["train"])
        if self.batch_size > num_images:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} is more than the {num_images} training images, so an epoch would "
                "have no step. Choose a smaller data.batch_size."
            )
        # A last, smaller batch would give BatchNorm statistics of a few images and the ranks different weights.
        return DataLoader(self.datasets["train"], batch_size=self.rank_batch_size(), shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_loader("test")

    def evaluation_loader(self, name: str) -> DataLoader:
        dataset, world_size = self.datasets[name], self.world_size()
        batch_size = even_batch_size(len(dataset), world_size, self.rank_batch_size())
        rank = self.trainer.global_rank if self.trainer else 0
        return DataLoader(dataset, batch_size=batch_size, sampler=ExactSampler(dataset, world_size, rank))

    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def rank_batch_size(self) -> int:
        return per_rank_batch_size(self.batch_size, self.world_size())
