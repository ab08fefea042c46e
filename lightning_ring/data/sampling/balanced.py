"""Class-balanced sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sampling.classes import ClassMembers
from lightning_ring.data.sampling.weighted import WeightedSampler
from lightning_ring.errors import ConfigurationError


class BalancedSampler(WeightedSampler):
    """Draws a sample of class c with weight n_c^-beta, where the class has n_c samples.

    Draws are systematic rather than independent: each class gets its share of every stretch of some
    65,000 draws up to one draw, and within a class no sample comes again before all of the class
    have come, over epochs too.

    Args:
        labels: Class number of every sample, integers ≥ 0. Classes without samples are never drawn.
        beta: 1: all classes equally often; 0.5: as the square root of their size; 0: as often as
            they are.
        num_samples: Draws in an epoch over all ranks; the size of the data set if left out. Above
            65,536 it is rounded up to whole rounds of equal length (`length` says the result). The
            rest of a division by the ranks is dropped.
        seed, rank, world_size: See `OrderedSampler`.
        fingerprint: A hash of ``labels`` if left out.
    """

    def __init__(
        self,
        labels: npt.ArrayLike,
        *,
        beta: float = 1.0,
        num_samples: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if not 0 <= beta <= 1:
            raise ConfigurationError(
                f"beta={beta} was given, expected 0 (as in the data) to 1 (all classes alike)."
            )
        self.members = ClassMembers(labels)
        super().__init__(
            self.members,
            self.members.counts.astype(np.float64) ** (1 - beta),
            num_samples,
            seed=seed,
            rank=rank,
            world_size=world_size,
            fingerprint=fingerprint or self.members.fingerprint,
        )
        self.beta = beta
        self.kind = f"balanced, beta={beta:g}, {self.length} draws"
