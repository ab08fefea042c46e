"""Batches of images: decoded into a reused uint8 buffer, finished on the device."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, takewhile
from time import perf_counter
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lightning_ring.data.loading.augment import (
    InProcesses,
    InThreads,
    SampleTransforms,
    Transform,
    TransformFailedError,
    name_of,
    transform_batch,
)
from lightning_ring.data.loading.loader import Loader, LoaderTimes, Samples
from lightning_ring.data.loading.transforms import (
    Crop,
    DeviceTransform,
    decode_into,
    height_and_width,
)
from lightning_ring.data.sampling.counters import Stream, integers, uniforms
from lightning_ring.data.sampling.sampler import Ints, OrderedSampler
from lightning_ring.errors import ConfigurationError, SampleError, ShardError, ShardLostError
from lightning_ring.host.accelerator import gpu_module, is_gpu
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


_SPARE = 8  # when many batches are let go at once, the memory of the others is freed


class Pool:
    """Memory of batches of one size, which is filled again and again: to the kernel, fresh pages
    cost more.

    Args:
        size: Height and width.
        pinned: For copies to a GPU.
    """

    def __init__(self, size: tuple[int, int], dtype: torch.dtype, pinned: bool = False) -> None:
        self.size = size
        self.dtype = dtype
        self.pinned = pinned
        self._free: deque[tuple[Tensor, Any]] = deque(maxlen=_SPARE)

    def take(self, num: int) -> Tensor:
        """``num`` images or more, each 3 x height x width, channels last, that nobody uses."""
        if self._free:
            memory, copied = self._free.popleft()
            if copied is not None:
                copied.synchronize()
            if len(memory) >= num:
                return memory
        # an evaluation's, in which the next training would not write
        with torch.inference_mode(False):
            rows = torch.empty((num, *self.size, 3), dtype=self.dtype, pin_memory=self.pinned)
            return rows.permute(0, 3, 1, 2)

    def give_back(self, memory: Tensor, copied: Any = None) -> None:
        """``copied``: an event, after which the device has read ``memory``."""
        self._free.append((memory, copied))

    def lend(self, memory: Tensor, num: int) -> Tensor:
        """The first ``num`` images of ``memory``, on the CPU, which is given back when the tensor,
        its views and arrays made of them are gone.
        """
        with torch.inference_mode(False):
            array = memory.permute(0, 2, 3, 1).view(torch.uint8).numpy()  # numpy knows no bfloat16
            lent = torch.from_numpy(array).view(memory.dtype).permute(0, 3, 1, 2)
        weakref.finalize(array, self.give_back, memory).atexit = False
        return lent[:num]


class OnDevice:
    """Brings views (batch x 3 x height x width, uint8, channels last) to ``device``.

    Args:
        transform: Run on each view; `None` leaves uint8 images.
        batch_transform: Run after it on each view and the labels.
        sizes: Heights and widths of the views.
    """

    def __init__(
        self,
        device: torch.device,
        transform: DeviceTransform | None,
        batch_transform: Transform | None,
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self.device = device
        self.transform = transform.to(device) if transform is not None else None
        self.batch_transform = batch_transform
        if isinstance(batch_transform, nn.Module):
            batch_transform.to(device)
        self.on_gpu = is_gpu(device)
        self._stream: Any = None
        # of each view
        self.pools = [Pool(size, torch.uint8, self.on_gpu) for size in sizes]
        self._floats = [] if transform is None else [Pool(size, transform.dtype) for size in sizes]

    def start(
        self, memories: Sequence[Tensor], samples: Samples, numbers: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views and ``numbers`` (labels first; one for each sample) on their way to the device.

        Args:
            memories: From `pools`, each with ``samples`` in its first places; given back.
        """
        if not self.on_gpu:
            views = [self._on_host(memory, samples, i) for i, memory in enumerate(memories)]
            return self._mixed(views, [tensor.to(self.device) for tensor in numbers], samples)
        gpu = gpu_module(self.device)
        if self._stream is None:
            self._stream = gpu.Stream(self.device)
        with gpu.stream(self._stream):
            views = [
                memory[: len(samples)].to(self.device, non_blocking=True) for memory in memories
            ]
            copied = gpu.Event()
            copied.record()
            views = [self._transformed(view, samples, i) for i, view in enumerate(views)]
            sent = [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in numbers]
            made = self._mixed(views, sent, samples)
        for pool, memory in zip(self.pools, memories, strict=True):
            pool.give_back(memory, copied)
        return made

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Let the caller's stream use ``tensors``, which `start` made."""
        if self._stream is not None:
            current = gpu_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)

    def _on_host(self, memory: Tensor, samples: Samples, view: int) -> Tensor:
        pool, num = self.pools[view], len(samples)
        if self.transform is None and self.device.type == "cpu":
            return pool.lend(memory, num)
        made = self._transformed(memory[:num].to(self.device), samples, view)
        pool.give_back(memory)
        return made

    def _transformed(self, images: Tensor, samples: Samples, view: int) -> Tensor:
        if self.transform is None:
            return images
        numbers = None
        if self.transform.is_random:
            num = self.transform.num_uniforms
            drawn = uniforms(
                samples.seed, Stream.COLOR, samples.epoch, samples.positions, num * (view + 1)
            )
            numbers = torch.from_numpy(drawn[:, -num:]).float()
            if self.on_gpu:  # from pageable memory the host would wait for the copy
                numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        if self.device.type != "cpu":
            return self.transform(images, numbers)
        pool, num = self._floats[view], len(images)
        return self.transform(images, numbers, out=pool.lend(pool.take(num), num))

    def _mixed(
        self, views: list[Tensor], numbers: list[Tensor], samples: Samples
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``views`` and ``numbers`` after `batch_transform`, which draws as the batch's first
        sample says.
        """
        if self.batch_transform is None:
            return views, numbers
        labels = numbers[0]
        [seeds] = integers(
            samples.seed, Stream.BATCH, samples.epoch, samples.positions[:1], len(views)
        ).tolist()
        made = [
            transform_batch(self.batch_transform, view, labels, seed)
            for view, seed in zip(views, seeds, strict=True)
        ]
        if len(views) > 1 and any(mixed is not labels for _, mixed in made):
            raise ConfigurationError(
                f"batch_transform {name_of(self.batch_transform)} changed the labels of a batch "
                f"with {len(views)} views, which would then differ from view to view. Leave labels "
                "as they are, or give one crop."
            )
        return [images for images, _ in made], [made[0][1], *numbers[1:]]


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
            InProcesses(sample_transform, num_threads, getattr(source, "chunk", _CHUNK))
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
