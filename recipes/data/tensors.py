"""Data sets small enough to be kept in memory as tensors."""

from abc import abstractmethod
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring.data import ShuffledSampler
from lightning_ring.errors import ConfigurationError
from recipes.batch_size import even_batch_size, per_rank_batch_size


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted indices of the rest and of a random ``fraction`` of every class."""
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


class BatchedTensors(TensorDataset):
    """Gives a whole batch at once, for ``collate_fn=whole_batch``: 100 times as fast."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        chosen = torch.as_tensor(indices)
        return [tuple(tensor[chosen] for tensor in self.tensors)]


def whole_batch(batches: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    (batch,) = batches
    return batch


class TensorImages(L.LightningDataModule):
    """Batches ``(images, labels)`` of tensors; evaluation counts every image once, on any number of
    ranks.

    Args:
        batch_size: Images of one step over all ranks.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.datasets: dict[str, BatchedTensors] = {}

    @abstractmethod
    def load(self) -> dict[str, BatchedTensors]:
        """``train``, ``val`` and ``test``, each of images and labels."""

    def setup(self, stage: str) -> None:
        self.datasets = self.datasets or self.load()

    def train_dataloader(self) -> DataLoader:
        num_images = len(self.datasets["train"])
        if self.batch_size > num_images:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} is more than the {num_images} training images, "
                "so an epoch would have no step. Choose a smaller data.batch_size."
            )
        return DataLoader(
            self.datasets["train"],
            batch_size=per_rank_batch_size(self.batch_size, self.world_size()),
            shuffle=True,
            # a smaller batch would give BatchNorm few images, and the ranks different weights
            drop_last=True,
            collate_fn=whole_batch,
        )

    def val_dataloader(self) -> DataLoader:
        return self.evaluation_loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.evaluation_loader("test")

    def evaluation_loader(self, name: str) -> DataLoader:
        dataset, world_size = self.datasets[name], self.world_size()
        rank_batch_size = per_rank_batch_size(self.batch_size, world_size)
        batch_size = even_batch_size(len(dataset), world_size, rank_batch_size)
        rank = self.trainer.global_rank if self.trainer else 0
        sampler = each_once(len(dataset), rank, world_size)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=whole_batch)

    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1


def each_once(num_images: int, rank: int, world_size: int) -> ShuffledSampler:
    """Rank r's images of an evaluation: r, r + world size, ... torch's `DistributedSampler` would
    repeat some to make the ranks even, and count them twice.
    """
    return ShuffledSampler(
        num_images, shuffle=False, remainder="keep", rank=rank, world_size=world_size
    )
