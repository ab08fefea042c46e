"""Batches of images: decoded into a reused uint8 buffer, finished on the device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, takewhile
from time import perf_counter
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_ring.data.loading.augment import (
    InProcesses,
    InThreads,
    SampleTransforms,
    Transform,
    TransformFailedError,
)
from lightning_ring.data.loading.loader import Loader, LoaderTimes, Samples
from lightning_ring.data.loading.on_device import OnDevice
from lightning_ring.data.loading.transforms import (
    Crop,
    DeviceTransform,
    decode_into,
    height_and_width,
)
from lightning_ring.data.sampling.counters import Stream, integers, uniforms
from lightning_ring.data.sampling.sampler import Ints, OrderedSampler
from lightning_ring.errors import ConfigurationError, SampleError, ShardError, ShardLostError
from lightning_ring.host.cores import available_cores

log = logging.getLogger(__name__)

_NEAR = 10  # images that are tried one after the other, before those further and further on


class Skipped:
    """The images that were skipped, each named once, and their replacements.

    The replacement depends on the image alone: order, crops and other ranks' samples stay as they
    are, on any number of ranks and after resuming. It is the next image of the class, so that
    class-balanced batches stay balanced; of another class where none that is tried of the class can
    be read.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}  # by index
        self._lock = threading.Lock()

    def add(self, index: int, where: str, error: Exception) -> None:
        with self._lock:
            known = index in self.reasons
            self.reasons.setdefault(index, str(error))
            num = len(self.reasons)
        if not known:
            reason = str(error) if where in str(error) else f"{where}: {error}"
            log.warning(
                "lightning_ring: skipped and replaced by another image (%d so far): %s", num, reason
            )

    def candidates(self, index: int, labels: npt.NDArray[Any]) -> Iterator[int]:
        """Images to try in the place of ``index``: of its class, then of any; the nearest first."""
        of_class = np.flatnonzero(labels == labels[index])
        at = int(np.searchsorted(of_class, index))
        yield from (int(of_class[(at + step) % len(of_class)]) for step in _steps(len(of_class)))
        yield from ((index + step) % len(labels) for step in _steps(len(labels)))


def _steps(num: int) -> list[int]:
    """How far from an image of ``num`` others are tried: neighbours lie in one shard, and may be
    lost together.
    """
    further = takewhile(lambda step: step < num, (_NEAR * 2**doubled for doubled in count(1)))
    return [*range(1, min(_NEAR + 1, num)), *further]


OnError = Literal["raise", "skip", "skip_shards"]
Rows = list[list[float]]
"""Random numbers of each crop of a sample."""
Data = bytes | npt.NDArray[np.uint8]
"""An encoded image, or its pixels: height x width x 3."""

_CHUNK = 8


class ImageSource(Protocol):
    """Images and their labels: a `ShardDataset`, an `ImageFolder`, or yours. Read by several
    threads.

    It may also have ``fingerprint``, which tells its images from others: a training does not resume
    over others; and ``chunk``, the number of images that a call of `read_many` is best asked for.
    """

    labels: npt.NDArray[Any]

    def __len__(self) -> int: ...
    def read_many(self, indices: Sequence[int], /) -> Sequence[Data]: ...
    def where(self, i: int, /) -> str: ...


@dataclass(slots=True)
class _Room:
    memories: list[Tensor]  # of each view
    places: list[tuple[Tensor, ...]]  # of each sample: its views, each 1 x 3 x height x width
    samples: Samples
    indices: Ints  # of the images in it: those of the samples, or their replacements
    numbers: list[Rows]  # of each sample
    seeds: list[list[int]]  # of each sample, for the transform of each crop


class ImageBatches:
    """Makes ``(images, labels)``, or ``(images, labels, indices)``, on ``device``.

    Args:
        source: The images.
        crop: Which part of each image, at which size; its random numbers depend on seed, epoch and
            position alone. A list of crops gives several views of each image: ``images`` is then a
            tuple, a batch for each crop.
        transform: Run on the device on the whole batch; `None` leaves uint8 images.
        device: Where batches go. On a GPU they are copied from pinned memory on a stream of their
            own.
        with_indices: Also give each sample's index in ``source``.
        on_error: What an image does that is damaged: ``"raise"`` ends the iteration, ``"skip"``
            puts another image into its place (see `Skipped`). A shard that is missing, cut short or
            cannot be read ends the iteration all the same (`ShardLostError`), but for
            ``"skip_shards"``, which replaces each of its images. An evaluation that counts each
            image once wants ``"raise"``.
        sample_transforms: Run on each crop of each image.
        batch_transform: ``(images, labels) -> (images, labels)``, run on the device after
            ``transform``.

    Attributes:
        skipped: The images that were skipped, by index, with the reasons: ``skipped.reasons``.
    """

    def __init__(
        self,
        source: ImageSource,
        crop: Crop | Sequence[Crop],
        transform: DeviceTransform | None,
        device: torch.device | str = "cpu",
        with_indices: bool = False,
        on_error: OnError = "raise",
        sample_transforms: SampleTransforms | None = None,
        batch_transform: Transform | None = None,
    ) -> None:
        if on_error not in get_args(OnError):
            expected = "'raise', 'skip' or 'skip_shards'"
            raise ConfigurationError(f"on_error={on_error!r} was given, expected {expected}.")
        self.on_error = on_error
        self.skipped = Skipped()
        self.source = source
        self.chunk: int | None = getattr(source, "chunk", _CHUNK)
        self.with_views = isinstance(crop, Sequence)
        self.crops = list(crop) if isinstance(crop, Sequence) else [crop]
        if not self.crops:
            raise ConfigurationError(
                "crop=[] was given, expected a crop, or a list of one or more."
            )
        self.with_indices = with_indices
        self.sample_transforms = sample_transforms
        self._sizes = [height_and_width(crop.size) for crop in self.crops]
        self._ends = list(accumulate((crop.num_uniforms for crop in self.crops), initial=0))
        self.on_device = OnDevice(torch.device(device), transform, batch_transform, self._sizes)
        self.ahead = self.on_device.on_gpu

    # -- in the thread that takes batches, before

    def open(self, samples: Samples) -> _Room:
        # of all at once: the calls cost more than the numbers
        at = samples.epoch, samples.positions
        drawn = uniforms(samples.seed, Stream.CROP, *at, self._ends[-1]).tolist()
        numbers = [[row[start:stop] for start, stop in pairwise(self._ends)] for row in drawn]
        seeds: list[list[int]] = []
        if self.sample_transforms is not None:
            self.sample_transforms.begin(self._sizes)
            seeds = integers(samples.seed, Stream.SAMPLE, *at, len(self.crops)).tolist()
        num = len(samples)
        memories = [pool.take(num) for pool in self.on_device.pools]
        places = list(zip(*(memory[:num].split(1) for memory in memories), strict=True))
        return _Room(memories, places, samples, samples.indices.copy(), numbers, seeds)

    # -- in the threads that decode

    def fill(self, room: _Room, offset: int, samples: Samples) -> LoaderTimes:
        indices = samples.indices.tolist()
        began = perf_counter()
        encoded = self._read(indices)
        read = perf_counter()
        numbers = room.numbers[offset : offset + len(indices)]
        skipped = 0
        with torch.inference_mode():  # nothing here is differentiated
            for place, (index, data, rows) in enumerate(
                zip(indices, encoded, numbers, strict=True), start=offset
            ):
                try:
                    self._decode(room.places[place], index, data, rows)
                except (SampleError, ShardError, OSError) as error:
                    self._raise_unless_skipped(error)
                    self.skipped.add(index, self.source.where(index), error)
                    room.indices[place] = self._replace(room.places[place], index, rows, error)
                    skipped += 1
            if self.sample_transforms is not None:
                self._transform(self.sample_transforms, room, offset, len(indices))
        return LoaderTimes(
            skipped=skipped, reading=read - began, transforming=perf_counter() - read
        )

    def _transform(self, transforms: SampleTransforms, room: _Room, offset: int, num: int) -> None:
        for view in range(len(self.crops)):
            images = [places[view][0] for places in room.places[offset : offset + num]]
            try:
                transforms.run(images, [seeds[view] for seeds in room.seeds[offset : offset + num]])
            except TransformFailedError as error:
                index = int(room.indices[offset + error.place])
                raise SampleError(f"{self.source.where(index)}: {error.reason}") from error

    def _read(self, indices: list[int]) -> list[Data | Exception]:
        """Encoded images; where they may be skipped, the error of each that cannot be read."""
        try:
            return [*self.source.read_many(indices)]
        except (SampleError, ShardError, OSError) as error:
            self._raise_unless_skipped(error)
            return [error] if len(indices) == 1 else [self._read([index])[0] for index in indices]

    def _raise_unless_skipped(self, error: Exception) -> None:
        """A lost shard is many images: an operator wants to know of it."""
        if self.on_error == "raise" or (
            self.on_error == "skip" and isinstance(error, ShardLostError)
        ):
            raise error

    def _decode(
        self, places: Sequence[Tensor], index: int, data: Data | Exception, rows: Rows
    ) -> None:
        if isinstance(data, Exception):
            raise data
        try:
            decode_into(places, data, self.crops, rows)
        # memory: a damaged header says any size
        except (ValueError, OSError, MemoryError) as error:
            raise SampleError(
                f"{self.source.where(index)}: cannot be decoded: {error}. Repair or remove it, or "
                "pack the images with `lightning-ring pack`, which leaves broken ones out and "
                "lists them."
            ) from error

    def _replace(self, places: Sequence[Tensor], index: int, rows: Rows, error: Exception) -> int:
        """Decode another image into ``places``; its index. Raises `SampleError`: none of those
        tried can be read.
        """
        tried = 0
        for other in self.skipped.candidates(index, self.source.labels):
            tried += 1
            try:
                self._decode(places, other, self._read([other])[0], rows)
                return other
            except (SampleError, ShardError, OSError) as failure:
                self._raise_unless_skipped(failure)
                self.skipped.add(other, self.source.where(other), failure)
        raise SampleError(
            f"{self.source.where(index)} cannot be read, nor can any of {tried} images in its "
            f"place: is the disk gone? {error}"
        ) from error

    # -- in the thread that takes batches, after

    def start(self, room: _Room) -> tuple[list[Tensor], list[Tensor]]:
        numbers = [torch.from_numpy(self.source.labels[room.indices]).long()]
        if self.with_indices:
            numbers.append(torch.from_numpy(room.indices))
        return self.on_device.start(room.memories, room.samples, numbers)

    def finish(self, started: tuple[list[Tensor], list[Tensor]]) -> tuple[Any, ...]:
        views, numbers = started
        self.on_device.finish([*views, *numbers])
        return (tuple(views) if self.with_views else views[0], *numbers)


def image_loader(
    source: ImageSource,
    sampler: OrderedSampler,
    batch_size: int | None = None,
    *,
    crop: Crop | Sequence[Crop],
    transform: DeviceTransform | None,
    sample_transform: Transform | None = None,
    in_processes: bool = False,
    batch_transform: Transform | None = None,
    device: torch.device | str = "cpu",
    with_indices: bool = False,
    on_error: OnError = "raise",
    drop_last: bool = False,
    num_threads: int | None = None,
    ranks_per_node: int = 1,
    prefetch: int = 2,
) -> Loader:
    """Batches ``(images, labels)`` of a `ShardDataset`, an `ImageFolder`, `LanceImages`, or another
    `ImageSource`.

    Args:
        source, crop, transform, device, with_indices, on_error: See `ImageBatches`.
        sample_transform: Run on each image before ``transform``: uint8, 3 x height x width, to the
            same. A transform of torchvision's v2, of Albumentations, or any function of a tensor.
            What it draws depends on seed, epoch and position alone.
        in_processes: Run ``sample_transform`` in a process beside each thread, for transforms that
            hold the interpreter (Python's lock) or draw from ``random`` and ``numpy.random``. It
            gives the same images as threads do.
        batch_transform: ``(images, labels) -> (images, labels)``, run on the device after
            ``transform``, such as MixUp. What it draws depends on seed, epoch and the position of
            the batch's first image.
        sampler: Of this rank.
        batch_size: Images of this rank and step; `PKSampler` knows its own.
        drop_last: Leave out a last batch that is smaller.
        num_threads: That decode. Left out: the cores that this process may use, divided by
            ``ranks_per_node``.
        ranks_per_node: Ranks that share those cores.
        prefetch: Batches that are filled while one is trained on.
    """
    num_threads = num_threads or available_cores(ranks_per_node)
    sample_transforms: SampleTransforms | None = None
    if sample_transform is not None:
        sample_transforms = (
            InProcesses(sample_transform, num_threads)
            if in_processes
            else InThreads(sample_transform)
        )
    maker = ImageBatches(
        source, crop, transform, device, with_indices, on_error, sample_transforms, batch_transform
    )
    return Loader(
        maker,
        sampler,
        batch_size,
        drop_last=drop_last,
        num_threads=num_threads,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
        images=getattr(source, "fingerprint", None),
    )
