"""Batches of images: decoded into a reused uint8 buffer, finished on the device."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_ring.data.decoding import Data
from lightning_ring.data.loading.augment import SampleTransforms, Transform, transform_batch
from lightning_ring.data.loading.loader import Loader, LoaderOptions, LoaderTimes, Samples
from lightning_ring.data.loading.transforms import (
    Crop,
    DeviceTransform,
    decode_into,
    height_and_width,
)
from lightning_ring.data.sampling.counters import Stream, integers, uniforms
from lightning_ring.data.sampling.sampler import Ints, OrderedSampler
from lightning_ring.errors import ConfigurationError, SampleError, ShardError, ShardLostError
from lightning_ring.host.accelerator import gpu_module, is_gpu, send

log = logging.getLogger(__name__)

_TRIED = 10  # images in the place of one, of its class and then of any


OnError = Literal["raise", "skip"]

_UNREADABLE = (SampleError, ShardError, OSError)
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
    memory: Tensor
    samples: Samples
    indices: Ints  # of the images in it: those of the samples, or their replacements
    numbers: list[list[float]]  # of the crop of each sample
    seeds: list[int]  # of each sample, for its transform


class ImageBatches:
    """Makes the batches of `image_loader`, which says what the arguments are.

    Attributes:
        skipped: The images that were skipped, by index, with the reasons.
    """

    def __init__(
        self,
        source: ImageSource,
        crop: Crop,
        transform: DeviceTransform | None,
        sample_transform: Transform | None,
        batch_transform: Transform | None,
        device: torch.device | str,
        with_indices: bool,
        on_error: OnError,
    ) -> None:
        if on_error not in get_args(OnError):
            raise ConfigurationError(f"on_error={on_error!r}: expected 'raise' or 'skip'.")
        if isinstance(crop, Sequence):
            raise ConfigurationError(
                f"crop={crop!r}: expected one crop. Make several views of an image in the training "
                "step, on the device."
            )
        self.on_error = on_error
        self.skipped: dict[int, str] = {}
        self._lock = threading.Lock()
        self.source = source
        self.chunk: int | None = getattr(source, "chunk", _CHUNK)
        self.crop = crop
        self.with_indices = with_indices
        size = height_and_width(crop.size)
        self.sample_transforms = sample_transform and SampleTransforms(sample_transform, size)
        self.device = torch.device(device)
        self.transform = None if transform is None else transform.to(self.device)
        self.batch_transform = batch_transform
        if isinstance(batch_transform, nn.Module):
            batch_transform.to(self.device)
        self.ahead = is_gpu(self.device)
        self._stream: Any = None
        self._pool = Pool(size, torch.uint8, pinned=self.ahead)
        self._floats = None if transform is None else Pool(size, transform.dtype)

    # -- in the thread that takes batches, before

    def open(self, samples: Samples) -> _Room:
        # of all at once: the calls cost more than the numbers
        at = samples.epoch, samples.positions
        numbers = uniforms(samples.seed, Stream.CROP, *at, self.crop.num_uniforms).tolist()
        seeds: list[int] = []
        if self.sample_transforms is not None:
            seeds = integers(samples.seed, Stream.SAMPLE, *at, 1)[:, 0].tolist()
        memory = self._pool.take(len(samples))
        return _Room(memory, samples, samples.indices.copy(), numbers, seeds)

    # -- in the threads that decode

    def fill(self, room: _Room, offset: int, samples: Samples) -> LoaderTimes:
        indices = samples.indices.tolist()
        began = perf_counter()
        encoded = self._read(indices)
        read = perf_counter()
        skipped = 0
        with torch.inference_mode():  # nothing here is differentiated
            for place, (index, data) in enumerate(zip(indices, encoded, strict=True), start=offset):
                try:
                    self._decode(room, place, index, data)
                except _UNREADABLE as error:
                    room.indices[place] = self._replace(room, place, index, error)
                    skipped += 1
                if self.sample_transforms is not None:
                    try:
                        self.sample_transforms.run(room.memory[place], room.seeds[place])
                    except SampleError as error:
                        where = self.source.where(int(room.indices[place]))
                        raise SampleError(f"{where}: {error}") from error
        transforming = perf_counter() - read
        return LoaderTimes(skipped=skipped, reading=read - began, transforming=transforming)

    def _read(self, indices: list[int]) -> list[Data | Exception]:
        """Encoded images; where they may be skipped, the error of each that cannot be read."""
        try:
            return [*self.source.read_many(indices)]
        except _UNREADABLE as error:
            self._raise_unless_skipped(error)
            return [error] if len(indices) == 1 else [self._read([index])[0] for index in indices]

    def _raise_unless_skipped(self, error: Exception) -> None:
        """A lost shard is many images: an operator wants to know of it."""
        if self.on_error == "raise" or isinstance(error, ShardLostError):
            raise error

    def _decode(self, room: _Room, place: int, index: int, data: Data | Exception) -> None:
        if isinstance(data, Exception):
            raise data
        try:
            out = room.memory[place : place + 1]
            decode_into(out, data, self.crop, room.numbers[place])
        except (ValueError, OSError, MemoryError) as error:
            raise SampleError(
                f"{self.source.where(index)}: cannot be decoded: {error}. Repair or remove it, or "
                "pack the images with `lightning-ring pack`, which leaves broken ones out and "
                "lists them."
            ) from error

    def _replace(self, room: _Room, place: int, index: int, error: Exception) -> int:
        """Decode another image into ``place``; its index. Raises `SampleError`: none of those
        tried can be read.
        """
        self._skip(index, error)
        labels = self.source.labels
        of_class = np.flatnonzero(labels == labels[index])
        after: list[int] = np.roll(of_class, -np.searchsorted(of_class, index)).tolist()
        after = after[1 : _TRIED + 1]
        after += [(index + step) % len(labels) for step in range(1, _TRIED + 1)]
        for other in after:
            try:
                self._decode(room, place, other, self._read([other])[0])
                return other
            except _UNREADABLE as failure:
                self._skip(other, failure)
        raise SampleError(
            f"{self.source.where(index)} cannot be read, nor can any image in its place: is the "
            f"disk gone? {error}"
        ) from error

    def _skip(self, index: int, error: Exception) -> None:
        self._raise_unless_skipped(error)
        with self._lock:
            known = index in self.skipped
            self.skipped.setdefault(index, str(error))
        if not known:
            where = self.source.where(index)
            reason = str(error) if where in str(error) else f"{where}: {error}"
            log.warning(
                "lightning_ring: skipped and replaced by another image (%d so far): %s",
                len(self.skipped),
                reason,
            )

    # -- in the thread that takes batches, after

    def start(self, room: _Room) -> list[Tensor]:
        """Images, labels and indices on their way to the device; the memory is given back."""
        if not self.ahead:
            return self._sent(room, None)
        gpu = gpu_module(self.device)
        if self._stream is None:
            self._stream = gpu.Stream(self.device)
        with gpu.stream(self._stream):
            return self._sent(room, gpu.Event())

    def _sent(self, room: _Room, copied: Any) -> list[Tensor]:
        """``copied``: an event of a GPU's stream, to be recorded when the images are there."""
        memory, samples = room.memory, room.samples
        num = len(samples)
        if self.transform is None and self.device.type == "cpu":
            images = self._pool.lend(memory, num)
        else:
            images = memory[:num].to(self.device, non_blocking=self.ahead)
            if copied is not None:
                copied.record()
            images = self._transformed(images, samples)
            self._pool.give_back(memory, copied)
        numbers = [torch.from_numpy(self.source.labels[room.indices]).long()]
        if self.with_indices:
            numbers.append(torch.from_numpy(room.indices))
        # from pageable memory the host would wait for the copy
        made = [images, *(send(tensor, self.device) for tensor in numbers)]
        if self.batch_transform is not None:
            # it draws as the batch's first sample says
            at = samples.epoch, samples.positions[:1]
            seed = int(integers(samples.seed, Stream.BATCH, *at, 1).item())
            made[:2] = transform_batch(self.batch_transform, made[0], made[1], seed)
        return made

    def _transformed(self, images: Tensor, samples: Samples) -> Tensor:
        if self.transform is None or self._floats is None:
            return images
        numbers = out = None
        if self.transform.is_random:
            at = samples.epoch, samples.positions
            drawn = uniforms(samples.seed, Stream.COLOR, *at, self.transform.num_uniforms)
            numbers = send(torch.from_numpy(drawn).float(), self.device)
        if self.device.type == "cpu":
            num = len(images)
            out = self._floats.lend(self._floats.take(num), num)
        return self.transform(images, numbers, out=out)

    def finish(self, started: list[Tensor]) -> tuple[Tensor, ...]:
        """``started``, which the caller's stream may use."""
        if self._stream is not None:
            current = gpu_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in started:
                tensor.record_stream(current)
        return tuple(started)


def image_loader(
    source: ImageSource,
    sampler: OrderedSampler,
    batch_size: int | None = None,
    *,
    crop: Crop,
    transform: DeviceTransform | None,
    sample_transform: Transform | None = None,
    batch_transform: Transform | None = None,
    device: torch.device | str = "cpu",
    with_indices: bool = False,
    on_error: OnError = "raise",
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Batches ``(images, labels)`` of a `ShardDataset`, an `ImageFolder`, `LanceImages`, or another
    `ImageSource`.

    Args:
        source: The images.
        sampler: Of this rank.
        batch_size: Images of this rank and step; `PKSampler` knows its own.
        crop: Which part of each image, at which size; its random numbers depend on seed, epoch and
            position alone.
        transform: Run on the device on the whole batch; `None` leaves uint8 images.
        sample_transform: Run on each image before ``transform``: uint8, 3 x height x width, to the
            same. A transform of torchvision's v2, of Albumentations, or any function of a tensor.
            What it draws depends on seed, epoch and position alone.
        batch_transform: ``(images, labels) -> (images, labels)``, run on the device after
            ``transform``, such as MixUp. What it draws depends on seed, epoch and the position of
            the batch's first image.
        device: Where batches go. On a GPU they are copied from pinned memory on a stream of their
            own.
        with_indices: Also give each sample's index in ``source``: ``(images, labels, indices)``.
        on_error: What an image does that is damaged: ``"raise"`` ends the iteration, ``"skip"``
            puts another image into its place: the next of its class, or else the next of all, so
            that order, crops and other ranks' samples stay as they are. A shard that is missing,
            cut short or cannot be read ends the iteration all the same (`ShardLostError`). An
            evaluation that counts each image once wants ``"raise"``.
        options: ``drop_last``, ``num_threads``, ``ranks_per_node``, ``prefetch``: see `Loader`.
    """
    transforms = (transform, sample_transform, batch_transform)
    maker = ImageBatches(source, crop, *transforms, device, with_indices, on_error)
    images = getattr(source, "fingerprint", None)
    return Loader(maker, sampler, batch_size, images=images, **options)
