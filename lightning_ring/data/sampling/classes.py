"""The samples of each class."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints
from lightning_ring.errors import ConfigurationError


class ClassMembers:
    """Samples grouped by class: 4 bytes a sample (8 above 2^31).

    Args:
        labels: Class number of every sample, integers ≥ 0.
    """

    def __init__(self, labels: npt.ArrayLike) -> None:
        given = np.asarray(labels)
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or len(given) == 0:
            found = f"labels of {given.dtype}, shape {given.shape}"
            raise ConfigurationError(f"{found}, were given, expected an integer for each sample.")
        if given.min() < 0:
            raise ConfigurationError(
                f"label {given.min()} of sample {given.argmin()} is negative, expected ≥ 0."
            )
        counts = np.bincount(given)
        # numpy sorts 16 bits by radix, which takes a fraction of the time; class numbers seldom
        # need more
        keys = given.astype(np.uint16) if len(counts) <= 1 << 16 else given
        order = np.argsort(keys, kind="stable")
        # sorted by class
        self._members = order.astype(np.int32 if len(given) < 2**31 else np.int64)
        self.numbers: Ints = np.flatnonzero(counts)  # the classes that have samples, ascending
        # how many samples each of them has
        self.counts: Ints = counts[self.numbers].astype(np.int64)
        self.starts: Ints = np.cumsum(self.counts) - self.counts
        digest = hashlib.blake2b(digest_size=8)
        for start in range(0, len(given), 1 << 20):
            digest.update(given[start : start + (1 << 20)].astype("<i8").tobytes())
        self.fingerprint = f"{len(given)} labels {digest.hexdigest()}"

    def draw(self, seed: int, classes: Ints, cycle: Ints, ordinal: Ints) -> Ints:
        """Samples number ``ordinal`` of ``classes`` (places in `numbers`), shuffled anew in
        every ``cycle``.
        """
        key = subkey(seed, Stream.MEMBERS, self.numbers[classes], cycle)
        return self._members[
            self.starts[classes] + permute(ordinal, self.counts[classes], key)
        ].astype(np.int64)
