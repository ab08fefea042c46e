"""Class-balanced sampling, in an order of which any position is cheap to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sampling.classes import ClassMembers
from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints, StridedSampler
from lightning_ring.errors import ConfigurationError

_ROUND = 1 << 16
_GOLDEN = 0.6180339887498949


class BalancedSampler(StridedSampler):
    """Draws a sample of class c with weight n_c^-beta, where the class has n_c samples.

    Draws are systematic rather than independent: each class gets its share of every stretch of some 65,000 draws up to
    one draw, and within a class no sample comes again before all of the class have come, over epochs too.

    An epoch of n draws is n equidistant points on the line on which each class has a piece as long as its share. A
    round takes every (number of rounds)-th of them, shuffled. How often a class was drawn before a round follows by
    counting points: positions are cheap to find.

    Args:
        labels: Class number of every sample, integers ≥ 0. Classes without samples are never drawn.
        beta: 1: all classes equally often; 0.5: as the square root of their size; 0: as often as they are.
        num_samples: Draws in an epoch over all ranks; the size of the data set if left out. Above 65,536 it is rounded
            up to whole rounds of equal length (`length` says the result). The rest of a division by the ranks is
            dropped.
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
            raise ConfigurationError(f"beta={beta} was given, expected 0 (as in the data) to 1 (all classes alike).")
        if num_samples is not None and num_samples <= 0:
            raise ConfigurationError(f"num_samples={num_samples} was given, expected a positive number of draws.")
        self.members = ClassMembers(labels)
        draws = int(self.members.counts.sum()) if num_samples is None else num_samples
        self.num_rounds = -(-draws // max(_ROUND, len(self.members.numbers)))
        self.round_length = -(-draws // self.num_rounds)
        super().__init__(
            self.num_rounds * self.round_length,
            "drop",
            seed=seed,
            rank=rank,
            world_size=world_size,
            fingerprint=fingerprint or self.members.fingerprint,
        )
        self.beta = beta
        self.kind = f"balanced, beta={beta:g}, {self.length} draws"
        weights = self.members.counts.astype(np.float64) ** (1 - beta)
        self._pieces = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()]) * self.length
        self._pieces[-1] = self.length
        self._drawn_before: tuple[int, Ints] = (0, np.zeros(len(weights), dtype=np.int64))

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        epoch, stop = self.epoch, self.position + self.num_left(self.position) * self.num_replicas
        first_points = self._first_points(epoch)
        residues = permute(np.arange(self.num_rounds), self.num_rounds, subkey(self.seed, Stream.ROUND, epoch))
        drawn = self._drawn(epoch)
        start_round = self.position // self.round_length
        for residue in residues[:start_round]:
            drawn = drawn + np.diff(self._first_slots(first_points, residue))
        offset = self.position + self.rank  # the next position of this rank
        for number in range(start_round, self.num_rounds):
            first_slots = self._first_slots(first_points, residues[number])
            start = number * self.round_length
            positions = np.arange(offset, min(start + self.round_length, stop), self.num_replicas)
            if len(positions):
                yield positions, self._round(number, first_slots, drawn, positions - start)
                offset = int(positions[-1]) + self.num_replicas
            drawn = drawn + np.diff(first_slots)

    def _round(self, number: int, first_slots: Ints, drawn: Ints, mine: Ints) -> Ints:
        """The samples at places ``mine`` of a round, before which each class had been ``drawn`` that often."""
        slots = np.arange(self.round_length)
        key = subkey(self.seed, Stream.ROUND, self.epoch, number + 1)
        classes = np.repeat(np.arange(len(drawn)), np.diff(first_slots))[permute(slots, self.round_length, key)]
        # how often a class was drawn since the round began: its occurrences, numbered in the order of time
        ordinal = np.empty(self.round_length, dtype=np.int64)
        ordinal[np.argsort(classes, kind="stable")] = slots - np.repeat(first_slots[:-1], np.diff(first_slots))
        classes, ordinal = classes[mine], ordinal[mine] + drawn[classes[mine]]
        return self.members.draw(self.seed, classes, *np.divmod(ordinal, self.members.counts[classes]))

    def _first_points(self, epoch: int) -> Ints:
        """The first point of each class's piece, and the number of points; they lie elsewhere in every epoch."""
        shift = (0.5 + epoch * _GOLDEN) % 1.0
        return cast(Ints, np.clip(np.ceil(self._pieces - shift), 0, self.length).astype(np.int64))

    def _first_slots(self, first_points: Ints, residue: np.int64) -> Ints:
        """The same in one round, which has the points that leave ``residue`` when divided by the number of rounds."""
        return cast(Ints, -((residue - first_points) // self.num_rounds))

    def _drawn(self, epoch: int) -> Ints:
        """How often each class was drawn before ``epoch``."""
        known, drawn = self._drawn_before
        if epoch < known:
            known, drawn = 0, np.zeros_like(drawn)
        for earlier in range(known, epoch):
            drawn = drawn + np.diff(self._first_points(earlier))
        self._drawn_before = epoch, drawn
        return drawn
