"""What a loader asks of those who make its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_ring.data.loading.times import LoaderTimes
from lightning_ring.data.sampling.sampler import Ints


@dataclass(frozen=True, slots=True)
class Samples:
    """Some samples of an epoch: where they stand in the global order, and which they are."""

    seed: int
    epoch: int
    positions: Ints
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> Samples:
        return Samples(self.seed, self.epoch, self.positions[start:stop], self.indices[start:stop])


class BatchMaker(Protocol):
    """Makes batches: `open` and `start` and `finish` are called by the thread that takes them, `fill` by the others.

    Attributes:
        chunk: Samples that one call of `fill` takes; `None`: the whole batch.
        ahead: Whether to start batch n + 1, once it is filled, before handing over n.
    """

    chunk: int | None
    ahead: bool

    def open(self, samples: Samples) -> Any:
        """Room for a batch of ``samples``."""

    def fill(self, room: Any, offset: int, samples: Samples) -> LoaderTimes:
        """Put ``samples`` into ``room`` from place ``offset`` on; returns the seconds that this took.

        Raises:
            SampleError: One of them cannot be had.
        """

    def start(self, room: Any) -> Any:
        """Send a filled batch on its way to the device."""

    def finish(self, started: Any) -> Any:
        """The batch, which the caller may use at once."""
