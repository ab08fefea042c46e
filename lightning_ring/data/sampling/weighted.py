"""Weighted draws from classes or sets, in an order of which any position is cheap to find."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints, SamplerOptions, StridedSampler
from lightning_ring.errors import ConfigurationError


class Groups:
    """Groups of samples, each of which is shuffled anew when it is used up.

    Args:
        counts: Samples of each group, above 0.
        numbers: Of the groups, which choose their orders; 0, 1, ... if left out.
        members: All samples, those of a group after each other; 0, 1, ... if left out.
    """

    def __init__(
        self, counts: Ints, numbers: Ints | None = None, members: npt.NDArray[Any] | None = None
    ) -> None:
        self.counts = counts
        self.numbers = np.arange(len(counts)) if numbers is None else numbers
        self.members = members
        self.starts: Ints = np.cumsum(counts) - counts

    def draw(self, seed: int, groups: Ints, cycle: Ints, ordinal: Ints) -> Ints:
        """Samples number ``ordinal`` of ``groups`` (places in `numbers`) in the order that they
        have in ``cycle``.
        """
        key = subkey(seed, Stream.MEMBERS, self.numbers[groups], cycle)
        places = self.starts[groups] + permute(ordinal, self.counts[groups], key)
        return places if self.members is None else self.members[places].astype(np.int64)


def classes_of(labels: npt.ArrayLike) -> tuple[Groups, str]:
    """The samples of each class that has any, ascending, 4 bytes a sample (8 above 2^31); and a
    hash of all labels.

    Args:
        labels: Class number of every sample, integers ≥ 0.
    """
    given = np.asarray(labels)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or len(given) == 0:
        raise ConfigurationError(
            f"labels of {given.dtype}, shape {given.shape}, were given, expected an integer for "
            "each sample."
        )
    if given.min() < 0:
        raise ConfigurationError(
            f"label {given.min()} of sample {given.argmin()} is negative, expected ≥ 0."
        )
    counts = np.bincount(given)
    # numpy sorts 16 bits by radix, which takes a fraction of the time; class numbers seldom need
    # more
    keys = given.astype(np.uint16) if len(counts) <= 1 << 16 else given
    order = np.argsort(keys, kind="stable")
    members = order.astype(np.int32 if len(given) < 2**31 else np.int64)
    numbers = np.flatnonzero(counts)
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(given), 1 << 20):
        digest.update(given[start : start + (1 << 20)].astype("<i8").tobytes())
    groups = Groups(counts[numbers].astype(np.int64), numbers, members)
    return groups, f"{len(given)} labels {digest.hexdigest()}"


_ROUND = 1 << 16
_GOLDEN = 0.6180339887498949


class WeightedSampler(StridedSampler):
    """Draws from groups of samples by their weights, as `BalancedSampler` says of its classes.

    An epoch of n draws is n equidistant points on the line on which each group has a piece as long
    as its share. A round takes every (number of rounds)-th of them, shuffled. How often a group was
    drawn before a round follows by counting points: positions are cheap to find.

    Args:
        members: The samples of each group.
        weights: Of the groups, float64 above 0; their sum is no matter.
        num_samples: As of `BalancedSampler`.
        options: See `OrderedSampler`.
    """

    def __init__(
        self,
        members: Groups,
        weights: npt.NDArray[np.float64],
        num_samples: int | None,
        default_fingerprint: str,
        **options: Unpack[SamplerOptions],
    ) -> None:
        if num_samples is not None and num_samples <= 0:
            raise ConfigurationError(
                f"num_samples={num_samples} was given, expected a positive number of draws."
            )
        draws = int(members.counts.sum()) if num_samples is None else num_samples
        self.num_rounds = -(-draws // max(_ROUND, len(weights)))
        self.round_length = -(-draws // self.num_rounds)
        super().__init__(
            self.num_rounds * self.round_length, "drop", default_fingerprint, **options
        )
        self.members = members
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
        each = np.diff(first_slots)
        groups = np.repeat(np.arange(len(drawn)), each)[permute(slots, self.round_length, key)]
        # how often a group was drawn since the round began: its occurrences, numbered in the order
        # of time
        ordinal = np.empty(self.round_length, dtype=np.int64)
        ordinal[np.argsort(groups, kind="stable")] = slots - np.repeat(first_slots[:-1], each)
        groups, ordinal = groups[mine], ordinal[mine] + drawn[groups[mine]]
        place = np.divmod(ordinal, self.members.counts[groups])
        return self.members.draw(self.seed, groups, *place)

    def _first_points(self, epoch: int) -> Ints:
        """The first point of each group's piece, and the number of points; they lie elsewhere in
        every epoch.
        """
        shift = (0.5 + epoch * _GOLDEN) % 1.0
        return np.clip(np.ceil(self._pieces - shift), 0, self.length).astype(np.int64)

    def _first_slots(self, first_points: Ints, residue: np.int64) -> Ints:
        """The same in one round, which has the points that leave ``residue`` when divided by the
        number of rounds.
        """
        return -((residue - first_points) // self.num_rounds)

    def _drawn(self, epoch: int) -> Ints:
        """How often each group was drawn before ``epoch``."""
        known, drawn = self._drawn_before
        if epoch < known:
            known, drawn = 0, np.zeros_like(drawn)
        for earlier in range(known, epoch):
            drawn = drawn + np.diff(self._first_points(earlier))
        self._drawn_before = epoch, drawn
        return drawn


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
        options: ``seed``, ``rank``, ``world_size``: see `OrderedSampler`. ``fingerprint``: a hash
            of ``labels`` if left out.
    """

    def __init__(
        self,
        labels: npt.ArrayLike,
        *,
        beta: float = 1.0,
        num_samples: int | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        if not 0 <= beta <= 1:
            raise ConfigurationError(
                f"beta={beta} was given, expected 0 (as in the data) to 1 (all classes alike)."
            )
        members, fingerprint = classes_of(labels)
        weights = members.counts.astype(np.float64) ** (1 - beta)
        super().__init__(members, weights, num_samples, fingerprint, **options)
        self.kind = f"balanced, beta={beta:g}, {self.length} draws"


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
        options: ``seed``, ``rank``, ``world_size``, ``fingerprint``: see `OrderedSampler`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        num_samples: int | None = None,
        **options: Unpack[SamplerOptions],
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
        fingerprint = f"sets of {', '.join(map(str, sizes))} samples"
        groups = Groups(np.array(sizes, dtype=np.int64))
        super().__init__(groups, np.array(weights), num_samples, fingerprint, **options)
        shares = ", ".join(f"{weight / sum(weights):.6g}" for weight in weights)
        self.kind = f"mixture, shares {shares}, {self.length} draws"
