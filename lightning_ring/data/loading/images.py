"""Batches of images: decoded into a reused uint8 buffer, finished on the device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal, Protocol, cast

import numpy.typing as npt
import torch
from torch import Tensor

from lightning_ring.data.loading.batch_maker import LoaderTimes, Samples
from lightning_ring.data.loading.generations import Generations, ResumeAt
from lightning_ring.data.loading.loader import Loader
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.data.loading.replacement import Skipped
from lightning_ring.data.loading.transforms import Crop, DeviceTransform
from lightning_ring.data.sampling.counters import Stream, uniforms
from lightning_ring.data.sampling.sampler import Ints, OrderedSampler
from lightning_ring.errors import ConfigurationError, SampleError, ShardError
from lightning_ring.host.accelerator import gpu_module, is_gpu

OnError = Literal["raise", "skip"]

_CHUNK = 8
_SPARE = 8  # buffers: when many batches are let go at once, the others are freed


class ImageSource(Protocol):
    """Encoded images and their labels: a `ShardDataset`, an `ImageFolder`, or yours. Read by several threads."""

    labels: npt.NDArray[Any]

    def __len__(self) -> int: ...
    def read_many(self, indices: Sequence[int], /) -> list[bytes]: ...
    def where(self, i: int, /) -> str: ...


class RemoteSource(Protocol):
    """What an `ImageSource` may have besides: it is told which images come next."""

    lookahead: int  # how many images ahead of their reading

    def will_need(self, indices: Sequence[int], /) -> None: ...


@dataclass(slots=True)
class _Memory:
    batch: Tensor  # batch size x 3 x size x size, uint8, channels last
    places: tuple[Tensor, ...]  # its images, each 1 x 3 x size x size
    copied: Any = None  # an event: the device has read it


@dataclass(slots=True)
class _Room:
    memory: _Memory
    samples: Samples
    indices: Ints  # of the images in it: those of the samples, or their replacements
    numbers: list[list[float]]  # of each sample, for its crop

    @property
    def images(self) -> Tensor:
        return self.memory.batch[: len(self.samples)]


class ImageBatches:
    """Makes ``(images, labels)``, or ``(images, labels, indices)``, on ``device``.

    Args:
        source: The images.
        crop: Which part of each image, at which size; its random numbers depend on seed, epoch and position alone.
        transform: Run on the device on the whole batch; `None` leaves uint8 images.
        device: Where batches go. On a GPU they are copied from pinned memory on a stream of their own.
        with_indices: Also give each sample's index in ``source``.
        on_error: What an image that cannot be read or decoded does: ``"raise"`` ends the iteration, ``"skip"`` puts
            another one into its place (see `Skipped`). An evaluation that counts each image once wants ``"raise"``.

    Attributes:
        skipped: The images that were skipped, by index, with the reasons: ``skipped.reasons``.
    """

    chunk: int | None = _CHUNK

    def __init__(
        self,
        source: ImageSource,
        crop: Crop,
        transform: DeviceTransform | None,
        device: torch.device | str = "cpu",
        with_indices: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ConfigurationError(f"on_error={on_error!r} was given, expected 'raise' or 'skip'.")
        self.on_error = on_error
        self.skipped = Skipped()
        self.source = source
        self.crop = crop
        self.device = torch.device(device)
        self.transform = transform.to(self.device) if transform is not None else None
        self.with_indices = with_indices
        self.ahead = is_gpu(self.device)
        self.lookahead: int = getattr(source, "lookahead", 0)  # of a set that lies elsewhere
        self._stream: Any = None
        self._free: deque[_Memory] = deque(maxlen=_SPARE)
        self._floats: deque[Tensor] = deque(maxlen=_SPARE)  # batch size x size x size x 3, on a CPU

    # -- in the thread that takes batches, before

    def announce(self, samples: Samples) -> None:
        cast(RemoteSource, self.source).will_need(samples.indices.tolist())

    def open(self, samples: Samples) -> _Room:
        # of all at once: the calls cost more than the numbers
        numbers = uniforms(samples.seed, Stream.CROP, samples.epoch, samples.positions, self.crop.num_uniforms).tolist()
        memory = self._free.popleft() if self._free else None
        if memory is None or len(memory.places) < len(samples):  # of a smaller batch
            shape = (len(samples), self.crop.size, self.crop.size, 3)
            with torch.inference_mode(False):  # an evaluation's, in which the next training would not write
                rows = torch.empty(shape, dtype=torch.uint8, pin_memory=self.ahead)
                batch = rows.permute(0, 3, 1, 2)
                memory = _Memory(batch, batch.split(1))
        if memory.copied is not None:
            memory.copied.synchronize()
        return _Room(memory, samples, samples.indices.copy(), numbers)

    # -- in the threads that decode

    def fill(self, room: _Room, offset: int, samples: Samples) -> LoaderTimes:
        indices = samples.indices.tolist()
        began = perf_counter()
        encoded = self._read(indices)
        read = perf_counter()
        numbers = room.numbers[offset : offset + len(indices)]
        skipped = 0
        with torch.inference_mode():  # nothing here is differentiated
            for place, (index, data, row) in enumerate(zip(indices, encoded, numbers, strict=True), start=offset):
                try:
                    self._decode(room.memory.places[place], index, data, row)
                except (SampleError, ShardError, OSError) as error:
                    if self.on_error == "raise":
                        raise
                    self.skipped.add(index, self.source.where(index), error)
                    room.indices[place] = self._replace(room.memory.places[place], index, row, error)
                    skipped += 1
        return LoaderTimes(skipped=skipped, reading=read - began, transforming=perf_counter() - read)

    def _read(self, indices: list[int]) -> list[bytes | Exception]:
        """Encoded images; where they may be skipped, the error of each that cannot be read."""
        try:
            return [*self.source.read_many(indices)]
        except (ShardError, OSError) as error:
            if self.on_error == "raise":
                raise
            return [error] if len(indices) == 1 else [self._read([index])[0] for index in indices]

    def _decode(self, place: Tensor, index: int, data: bytes | Exception, row: list[float]) -> None:
        if isinstance(data, Exception):
            raise data
        try:
            decode_into(place, data, self.crop, row)
        except (ValueError, OSError, MemoryError) as error:  # memory: a damaged header says any size
            raise SampleError(
                f"{self.source.where(index)}: cannot be decoded: {error}. Repair or remove it, or pack the images with "
                "`lightning-ring pack`, which leaves broken ones out and lists them."
            ) from error

    def _replace(self, place: Tensor, index: int, row: list[float], error: Exception) -> int:
        """Decode another image into ``place``; its index. Raises `SampleError`: none of those tried can be read."""
        tried = 0
        for other in self.skipped.candidates(index, self.source.labels):
            tried += 1
            try:
                self._decode(place, other, self._read([other])[0], row)
                return other
            except (SampleError, ShardError, OSError) as failure:
                self.skipped.add(other, self.source.where(other), failure)
        raise SampleError(
            f"{self.source.where(index)} cannot be read, nor can any of {tried} images in its place: is the disk gone? "
            f"{error}"
        ) from error

    # -- in the thread that takes batches, after

    def start(self, room: _Room) -> tuple[Tensor, ...]:
        samples = room.samples
        labels = torch.from_numpy(self.source.labels[room.indices]).long()
        extra = (torch.from_numpy(room.indices),) if self.with_indices else ()
        if not self.ahead:
            if self.transform is None and self.device.type == "cpu":
                rows = lend(room.images.permute(0, 2, 3, 1), partial(self._free.append, room.memory))
                return rows.permute(0, 3, 1, 2), labels, *extra
            images = room.images.to(self.device)
            if self.transform is not None:
                images = self._transformed(images, samples)
            self._free.append(room.memory)
            return images, labels.to(self.device), *extra
        gpu = gpu_module(self.device)
        if self._stream is None:
            self._stream = gpu.Stream(self.device)
        with gpu.stream(self._stream):
            images = room.images.to(self.device, non_blocking=True)
            copied = room.memory.copied = gpu.Event()
            copied.record()
            if self.transform is not None:
                images = self._transformed(images, samples)
            sent = images, *(t.pin_memory().to(self.device, non_blocking=True) for t in (labels, *extra))
        self._free.append(room.memory)
        return sent

    def finish(self, started: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._stream is not None:
            current = gpu_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in started:
                tensor.record_stream(current)
        return started

    def _transformed(self, images: Tensor, samples: Samples) -> Tensor:
        assert self.transform is not None
        numbers = None
        if self.transform.is_random:
            num = self.transform.num_uniforms
            drawn = uniforms(samples.seed, Stream.COLOR, samples.epoch, samples.positions, num)
            numbers = torch.from_numpy(drawn).float()
            if self.ahead:  # from pageable memory the host would wait for the copy
                numbers = numbers.pin_memory().to(self.device, non_blocking=True)
        if self.device.type != "cpu":
            return self.transform(images, numbers)
        memory = self._floats.popleft() if self._floats else None
        if memory is None or len(memory) < len(images):
            with torch.inference_mode(False):
                memory = torch.empty(images.permute(0, 2, 3, 1).shape, dtype=self.transform.dtype)
        out = lend(memory[: len(images)], partial(self._floats.append, memory))
        return self.transform(images, numbers, out=out.permute(0, 3, 1, 2))


def lend(memory: Tensor, release: Callable[[], object]) -> Tensor:
    """A tensor over ``memory`` (contiguous, on the CPU), which is filled again: to the kernel, fresh pages cost more.

    ``release`` is called when the tensor, its views and arrays made of them are gone, in the thread of the last one.
    """
    with torch.inference_mode(False):
        array = memory.view(torch.uint8).numpy()  # numpy knows no bfloat16
        lent = torch.from_numpy(array).view(memory.dtype)
    weakref.finalize(array, release).atexit = False
    return lent


def image_loader(
    source: ImageSource,
    sampler: OrderedSampler | Callable[[Any], OrderedSampler],
    batch_size: int | None = None,
    *,
    crop: Crop,
    transform: DeviceTransform | None,
    device: torch.device | str = "cpu",
    with_indices: bool = False,
    on_error: OnError = "raise",
    drop_last: bool = False,
    num_threads: int | None = None,
    ranks_per_node: int = 1,
    prefetch: int = 2,
    resume_at: ResumeAt = "saved",
) -> Loader:
    """Batches ``(images, labels)`` of a `ShardDataset`, an `ImageFolder`, or another `ImageSource`.

    Args:
        source, crop, transform, device, with_indices, on_error: See `ImageBatches`.
        sampler: Of this rank; or a function that makes it for the source, so that a checkpoint can go on with the
            generation of the set that it was saved at: ``lambda photos: ShuffledSampler(len(photos))``.
        batch_size: Images of this rank and step; `PKSampler` knows its own.
        drop_last: Leave out a last batch that is smaller.
        num_threads: That decode. Left out: the cores that this process may use, divided by ``ranks_per_node``.
        ranks_per_node: Ranks that share those cores.
        prefetch: Batches that are filled while one is trained on.
        resume_at: Where the set has changed since a checkpoint was saved: ``"saved"`` goes on with the images as they
            were, exactly; ``"newest"`` with the images of ``source``.
    """
    maker = ImageBatches(source, crop, transform, device, with_indices, on_error)
    make_sampler = None if isinstance(sampler, OrderedSampler) else sampler
    return Loader(
        maker,
        sampler if isinstance(sampler, OrderedSampler) else sampler(source),
        batch_size,
        drop_last=drop_last,
        num_threads=num_threads,
        ranks_per_node=ranks_per_node,
        prefetch=prefetch,
        generations=Generations(maker, make_sampler, resume_at),
    )
