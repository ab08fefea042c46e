"""Where a loader's time goes."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class LoaderTimes:
    """Sums since the loader was built, in seconds by the clock.

    ``reading`` and ``transforming`` are added up over the threads, so both may grow faster than time passes; the others
    are of the thread that takes the batches.

    Attributes:
        batches, samples: Handed over so far.
        reading: Getting encoded images from files.
        transforming: Decoding, cropping and resizing; of a torch data set all of ``__getitem__``.
        collating: Making a batch out of the samples of a torch data set, in its thread.
        waiting: What the consumer waited for a batch that was not ready.
        copying: Handing the batch to the device and starting the work there (which CUDA may do later).
    """

    batches: int = 0
    samples: int = 0
    reading: float = 0.0
    transforming: float = 0.0
    collating: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0

    def __sub__(self, earlier: LoaderTimes) -> LoaderTimes:
        return LoaderTimes(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __iadd__(self, other: LoaderTimes) -> LoaderTimes:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self

    def copy(self) -> LoaderTimes:
        return self - LoaderTimes()
