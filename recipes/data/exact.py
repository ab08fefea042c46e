"""Batches over ranks: what each rank takes in training, and evaluation that sees every image
exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Dataset, DistributedSampler

from lightning_ring.errors import ConfigurationError


class ExactSampler(DistributedSampler):
    """Gives rank r samples r, r + world size, ...: each sample once, none repeated to make the
    ranks even.

    `DistributedSampler` repeats samples so that all ranks have equally many, which counts some
    images twice. Lightning leaves a subclass of it in place. The ranks' shares differ by at most
    one sample; see `even_batch_size`.
    """

    def __init__(self, dataset: Dataset, num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        assert isinstance(dataset, Sized)
        self.indices = range(rank, len(dataset), num_replicas)
        # nothing repeated, nothing dropped
        self.num_samples, self.total_size = len(self.indices), len(dataset)
        if len(dataset) < num_replicas:
            raise ConfigurationError(
                f"{len(dataset)} images cannot be evaluated on {num_replicas} ranks: each needs at "
                "least one. Use fewer ranks, or a larger validation and test set."
            )

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def even_batch_size(num_samples: int, world_size: int, batch_size: int) -> int:
    """Smallest size, at least ``batch_size``, that cuts every rank's `ExactSampler` share into
    equally many batches.

    Shares may differ by one sample. A rank with one batch more would wait in a collective that the
    others never call, such as DistributedDataParallel's broadcast of buffers.
    """
    share, longer = divmod(num_samples, world_size)
    while longer and share % batch_size == 0:
        batch_size += 1
    return batch_size
