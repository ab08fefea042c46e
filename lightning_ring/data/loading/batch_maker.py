"""The interface between the loader and the objects that make its batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from lightning_ring.data.sampling.sampler import Ints


@dataclass(slots=True)
class LoaderTimes:
    """Sums since the loader was built, in seconds by the clock.

    ``reading`` and ``transforming`` are added up over the threads, so both may grow faster than
    time passes; the others are of the thread that takes the batches.

    Attributes:
        batches, samples: Handed over so far.
        skipped: Samples among them that took the place of others (``on_error`` of `ImageBatches`).
        reading: Getting encoded images from files.
        transforming: Decoding, cropping and resizing; of a torch data set all of ``__getitem__``.
        collating: Making a batch out of the samples of a torch data set, in its thread.
        waiting: Time that the consumer waited for a batch that was not ready.
        copying: Handing the batch to the device and starting the work there (which CUDA may do
            later).
    """

    batches: int = 0
    samples: int = 0
    skipped: int = 0
    reading: float = 0.0
    transforming: float = 0.0
    collating: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0

    def __iadd__(self, other: LoaderTimes) -> LoaderTimes:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of an epoch: their positions in the global order, and their indices in the data
    set.
    """

    seed: int
    epoch: int
    positions: Ints
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> Samples:
        return Samples(self.seed, self.epoch, self.positions[start:stop], self.indices[start:stop])


class BatchMaker(Protocol):
    """Makes batches: `fill` is called by threads of the loader, everything else by the thread
    that takes batches.
    """

    chunk: int | None  # samples that one call of `fill` takes; `None`: the whole batch
    ahead: bool  # whether to start batch n + 1, once it is filled, before handing over n

    def open(self, samples: Samples) -> Any:
        """Room for a batch of ``samples``."""

    def fill(self, room: Any, offset: int, samples: Samples) -> LoaderTimes:
        """Put ``samples`` into ``room`` from place ``offset`` on; returns the seconds that this
        took.

        Raises `SampleError`: one of them cannot be had.
        """

    def start(self, room: Any) -> Any:
        """Send a filled batch on its way to the device."""

    def finish(self, started: Any) -> Any:
        """The batch, which the caller may use at once."""
