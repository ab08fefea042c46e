"""`ElasticSampler`: the rest of an epoch is dealt out anew when the ranks change."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from lightning_ring.horovod.context import rank, size


class ElasticSampler(Sampler[int]):
    """Deals out the samples of ``dataset`` that are not processed yet, equally many to each rank.

    Put it into a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of
    an epoch. If the rest is not divisible by the ranks, its first samples come twice. With
    ``shuffle`` the order follows from ``seed`` and the epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of all ranks
        self.processed_indices: set[int] = set()  # beyond those, by `record_indices`
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has processed the samples ``indices``; `State.sync` tells the others."""
        self.processed_indices.update(int(index) for index in indices)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        return state | (
            {"processed_indices": set(self.processed_indices)} if self.processed_indices else {}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deal out what is left to the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        rest = order[self.processed_num :]
        self.remaining_indices = [index for index in rest if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        rest = self.remaining_indices
        missing = self.total_size - len(rest)
        padded = rest + (rest * (-(-missing // max(1, len(rest)))))[:missing]
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
