"""Every sample once an epoch, in random order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_ring.data.sampling.counters import Stream, subkey
from lightning_ring.data.sampling.permutation import permute
from lightning_ring.data.sampling.sampler import Ints, Remainder, StridedSampler

_BLOCK = 8192  # positions computed at a time: a few milliseconds


class ShuffledSampler(StridedSampler):
    """Every one of ``size`` samples once an epoch. Starts at once and takes no memory, however many there are.

    Args:
        size: Samples in the data set.
        shuffle: False: in order, for evaluation.
        remainder: What happens where ``size`` does not divide by the ranks. ``"repeat"`` gives the last step samples of
            the epoch's start again, as torch's sampler does; ``"drop"`` leaves the last ones out of this epoch;
            ``"keep"`` gives some ranks one sample more, so that each is seen exactly once.
        seed, rank, world_size, fingerprint: See `OrderedSampler`.
    """

    def __init__(
        self,
        size: int,
        *,
        shuffle: bool = True,
        remainder: Remainder = "repeat",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(
            size, remainder, seed=seed, rank=rank, world_size=world_size, fingerprint=fingerprint or f"{size} samples"
        )
        self.shuffle = shuffle
        self.kind = "shuffled" if shuffle else "in order"

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        num, key = self.num_left(self.position), subkey(self.seed, Stream.ORDER, self.epoch)
        for start in range(0, num, _BLOCK):
            positions = self.my_positions(start, min(start + _BLOCK, num))
            wrapped = positions % self.length
            yield positions, permute(wrapped, np.int64(self.length), key) if self.shuffle else wrapped
