"""Sampling from several sets by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints
from lightning_ring.data.sampling.weighted import WeightedSampler
from lightning_ring.errors import ConfigurationError


class _Stretches:
    """Groups of samples that follow each other: takes no memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.counts: Ints = np.array(sizes, dtype=np.int64)
        self._starts: Ints = np.cumsum(self.counts) - self.counts

    def draw(self, seed: int, groups: Ints, cycle: Ints, ordinal: Ints) -> Ints:
        key = subkey(seed, Stream.MEMBERS, groups, cycle)
        return self._starts[groups] + permute(ordinal, self.counts[groups], key)


class MixtureSampler(WeightedSampler):
    """Draws from the sets of a `Mixture`: from set s in the share ``weights[s] / sum(weights)``.

    Each set gets its share of every stretch of some 65,000 draws up to one draw. A set is used up
    before a sample of it comes again, over epochs too; a small set with a large weight comes
    several times an epoch.

    Args:
        sizes: Samples in each set: `Mixture.sizes`.
        weights: A number above 0 for each set.
        num_samples: Draws in an epoch over all ranks; the sum of the sizes if left out. Above
            65,536 it is rounded up to whole rounds of equal length (`length` says the result). The
            rest of a division by the ranks is dropped.
        seed, rank, world_size, fingerprint: See `OrderedSampler`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        num_samples: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        sizes, weights = [int(size) for size in sizes], [float(weight) for weight in weights]
        if not sizes or min(sizes) < 1:
            raise ConfigurationError(
                f"sizes={sizes} were given, expected one sample or more in each set."
            )
        if len(weights) != len(sizes) or not all(0 < weight < float("inf") for weight in weights):
            raise ConfigurationError(
                f"weights={weights} were given, expected {len(sizes)} numbers above 0."
            )
        super().__init__(
            _Stretches(sizes),
            np.array(weights),
            num_samples,
            seed=seed,
            rank=rank,
            world_size=world_size,
            fingerprint=fingerprint or f"sets of {', '.join(map(str, sizes))} samples",
        )
        shares = ", ".join(f"{weight / sum(weights):.6g}" for weight in weights)
        self.kind = f"mixture, shares {shares}, {self.length} draws"
