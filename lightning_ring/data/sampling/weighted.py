"""Weighted draws from groups of samples, in an order of which any position is cheap to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints, StridedSampler
from lightning_ring.errors import ConfigurationError

_ROUND = 1 << 16
_GOLDEN = 0.6180339887498949


class Members(Protocol):
    """The samples of each group, of which each is shuffled anew when it is used up."""

    counts: Ints

    def draw(self, seed: int, groups: Ints, cycle: Ints, ordinal: Ints) -> Ints:
        """Samples number ``ordinal`` of ``groups`` in the order that they have in ``cycle``."""


class WeightedSampler(StridedSampler):
    """Draws from groups of samples by their weights.

    Draws are systematic rather than independent: each group gets its share of every stretch of some
    65,000 draws up to one draw, and within a group no sample comes again before all of it have
    come, over epochs too.

    An epoch of n draws is n equidistant points on the line on which each group has a piece as long
    as its share. A round takes every (number of rounds)-th of them, shuffled. How often a group was
    drawn before a round follows by counting points: positions are cheap to find.

    Args:
        members: The samples of each group.
        weights: Of the groups, float64 above 0; their sum is no matter.
        num_samples: Draws in an epoch over all ranks; the number of samples if left out. Above
            65,536 it is rounded up to whole rounds of equal length (`length` says the result). The
            rest of a division by the ranks is dropped.
        options: See `OrderedSampler`.
    """

    def __init__(
        self,
        members: Members,
        weights: npt.NDArray[np.float64],
        num_samples: int | None,
        **options: Any,
    ) -> None:
        if num_samples is not None and num_samples <= 0:
            raise ConfigurationError(
                f"num_samples={num_samples} was given, expected a positive number of draws."
            )
        draws = int(members.counts.sum()) if num_samples is None else num_samples
        self.num_rounds = -(-draws // max(_ROUND, len(weights)))
        self.round_length = -(-draws // self.num_rounds)
        super().__init__(self.num_rounds * self.round_length, "drop", **options)
        self._members = members
        self._pieces = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()]) * self.length
        self._pieces[-1] = self.length
        self._drawn_before: tuple[int, Ints] = (0, np.zeros(len(weights), dtype=np.int64))

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        epoch, stop = self.epoch, self.position + self.num_left(self.position) * self.num_replicas
        first_points = self._first_points(epoch)
        residues = permute(
            np.arange(self.num_rounds), self.num_rounds, subkey(self.seed, Stream.ROUND, epoch)
        )
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
        """The samples at places ``mine`` of a round, before which each group had been ``drawn``
        that often.
        """
        slots = np.arange(self.round_length)
        key = subkey(self.seed, Stream.ROUND, self.epoch, number + 1)
        groups = np.repeat(np.arange(len(drawn)), np.diff(first_slots))[
            permute(slots, self.round_length, key)
        ]
        # how often a group was drawn since the round began: its occurrences, numbered in the order
        # of time
        ordinal = np.empty(self.round_length, dtype=np.int64)
        ordinal[np.argsort(groups, kind="stable")] = slots - np.repeat(
            first_slots[:-1], np.diff(first_slots)
        )
        groups, ordinal = groups[mine], ordinal[mine] + drawn[groups[mine]]
        return self._members.draw(
            self.seed, groups, *np.divmod(ordinal, self._members.counts[groups])
        )

    def _first_points(self, epoch: int) -> Ints:
        """The first point of each group's piece, and the number of points; they lie elsewhere in
        every epoch.
        """
        shift = (0.5 + epoch * _GOLDEN) % 1.0
        return cast(Ints, np.clip(np.ceil(self._pieces - shift), 0, self.length).astype(np.int64))

    def _first_slots(self, first_points: Ints, residue: np.int64) -> Ints:
        """The same in one round, which has the points that leave ``residue`` when divided by the
        number of rounds.
        """
        return cast(Ints, -((residue - first_points) // self.num_rounds))

    def _drawn(self, epoch: int) -> Ints:
        """How often each group was drawn before ``epoch``."""
        known, drawn = self._drawn_before
        if epoch < known:
            known, drawn = 0, np.zeros_like(drawn)
        for earlier in range(known, epoch):
            drawn = drawn + np.diff(self._first_points(earlier))
        self._drawn_before = epoch, drawn
        return drawn
