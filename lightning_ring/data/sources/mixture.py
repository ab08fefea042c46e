"""Several sets of images as one."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, SupportsIndex

import numpy as np

from lightning_ring.errors import ConfigurationError


class Mixture:
    """The images of ``sources`` one after the other, for `MixtureSampler`.

    Classes are joined by name; the first set keeps its numbers, and new classes follow.

    Args:
        sources: `ShardDataset`, `ImageFolder`, or other `ImageSource` objects: all with
            ``classes``, or none.

    Attributes:
        sizes: Images in each set.
        labels: Class number of every image, int32.
        classes: Class names by number; empty if the sets name none.
        fingerprint: Equal for two mixtures of equal sets in the same order.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        if not sources:
            raise ConfigurationError("Mixture([]) was called, expected one set or more.")
        named = [source for source in sources if getattr(source, "classes", None)]
        if named and len(named) < len(sources):
            raise ConfigurationError(
                f"{len(named)} of {len(sources)} sets name their classes, expected all or none: "
                "else equal numbers may mean different classes."
            )
        self.sources = list(sources)
        self.sizes = [len(source) for source in sources]
        self._ends = list(accumulate(self.sizes))
        self.classes = list(dict.fromkeys(name for source in named for name in source.classes))
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = []
        for source in sources:
            own = np.asarray(source.labels, np.int32)
            if named:
                own = np.array([numbers[name] for name in source.classes], np.int32)[own]
            labels.append(own)
        self.labels = np.concatenate(labels)
        self.chunk = max(getattr(source, "chunk", 8) for source in sources)
        parts = [str(getattr(source, "fingerprint", len(source))) for source in sources]
        self.fingerprint = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def place(self, i: SupportsIndex) -> tuple[int, int]:
        """The set of image ``i``, and its index there."""
        i = range(len(self))[i]
        source = bisect_right(self._ends, i)
        return source, i - self._ends[source] + self.sizes[source]

    def read_many(self, indices: Sequence[int]) -> list[Any]:
        places = [self.place(i) for i in indices]
        data = {}
        for source in {source for source, _ in places}:
            inside = [i for other, i in places if other == source]
            data[source] = iter(self.sources[source].read_many(inside))
        return [next(data[source]) for source, _ in places]

    def where(self, i: SupportsIndex) -> str:
        """Image ``i`` for an error message."""
        source, inside = self.place(i)
        return str(self.sources[source].where(inside))
