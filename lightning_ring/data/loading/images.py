"""Batches of images: decoded into a reused uint8 buffer, finished on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from lightning_ring.data.loading.crops import Crop
from lightning_ring.data.loading.device import DeviceTransform
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.data.loading.samples import Samples
from lightning_ring.data.loading.times import LoaderTimes
from lightning_ring.data.sampling.counters import Stream, uniforms
from lightning_ring.errors import SampleError

_CHUNK = 8


class ImageSource(Protocol):
    """Encoded images and their labels: a `ShardDataset`, an `ImageFolder`, or yours. Read by several threads."""

    labels: npt.NDArray[Any]

    def __len__(self) -> int: ...
    def read_many(self, indices: Sequence[int], /) -> list[bytes]: ...
    def where(self, i: int, /) -> str: ...


@dataclass(slots=True)
class _Room:
    buffer: Tensor  # batch size x 3 x size x size, uint8, channels last
    samples: Samples
    copied: torch.cuda.Event | None = None  # the device has read the buffer

    @property
    def images(self) -> Tensor:
        return self.buffer[: len(self.samples)]


class ImageBatches:
    """Makes ``(images, labels)``, or ``(images, labels, indices)``, on ``device``.

    Args:
        source: The images.
        crop: Which part of each image, at which size; its random numbers depend on seed, epoch and position alone.
        transform: Run on the device on the whole batch; `None` leaves uint8 images.
        device: Where batches go. On CUDA they are copied from pinned memory on a stream of their own.
        with_indices: Also give each sample's index in ``source``.
    """

    chunk: int | None = _CHUNK

    def __init__(
        self,
        source: ImageSource,
        crop: Crop,
        transform: DeviceTransform | None,
        device: torch.device | str = "cpu",
        with_indices: bool = False,
    ) -> None:
        self.source = source
        self.crop = crop
        self.device = torch.device(device)
        self.transform = transform.to(self.device) if transform is not None else None
        self.with_indices = with_indices
        self.ahead = self.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._free: deque[_Room] = deque()

    # -- in the thread that takes batches, before

    def open(self, samples: Samples) -> _Room:
        if not self._free or len(self._free[0].buffer) < len(samples):
            self._free.clear()  # of smaller batches
            shape = (len(samples), self.crop.size, self.crop.size, 3)
            with torch.inference_mode(False):  # an evaluation's; the threads that fill the buffer are outside it
                buffer = torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            return _Room(buffer.permute(0, 3, 1, 2), samples)
        room = self._free.popleft()
        if room.copied is not None:
            room.copied.synchronize()
        return _Room(room.buffer, samples)

    # -- in the threads that decode

    def fill(self, room: _Room, offset: int, samples: Samples) -> LoaderTimes:
        indices = samples.indices.tolist()
        began = perf_counter()
        encoded = self.source.read_many(indices)
        read = perf_counter()
        numbers = uniforms(samples.seed, Stream.CROP, samples.epoch, samples.positions, self.crop.num_uniforms).tolist()
        for place, (index, data) in enumerate(zip(indices, encoded, strict=True), start=offset):
            try:
                decode_into(room.buffer[place : place + 1], data, self.crop, numbers[place - offset])
            except (ValueError, OSError) as error:
                raise SampleError(
                    f"{self.source.where(index)}: cannot be decoded: {error}. Repair or remove it, or pack the images "
                    "with `lightning-ring pack`, which leaves broken ones out and lists them."
                ) from error
        return LoaderTimes(reading=read - began, transforming=perf_counter() - read)

    # -- in the thread that takes batches, after

    def start(self, room: _Room) -> tuple[Tensor, ...]:
        samples = room.samples
        labels = torch.from_numpy(self.source.labels[samples.indices]).long()
        extra = (torch.from_numpy(samples.indices),) if self.with_indices else ()
        if self.device.type != "cuda":
            if self.transform is None:
                return room.images.to(self.device), labels.to(self.device), *extra  # a CPU keeps the buffer
            images = self._transformed(room.images.to(self.device), samples)
            self._free.append(room)
            return images, labels.to(self.device), *extra
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            images = room.images.to(self.device, non_blocking=True)
            room.copied = torch.cuda.Event()
            room.copied.record()
            if self.transform is not None:
                images = self._transformed(images, samples)
            sent = images, *(t.pin_memory().to(self.device, non_blocking=True) for t in (labels, *extra))
        self._free.append(room)
        return sent

    def finish(self, started: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in started:
                tensor.record_stream(current)
        return started

    def _transformed(self, images: Tensor, samples: Samples) -> Tensor:
        assert self.transform is not None
        if not self.transform.is_random:
            return self.transform(images)
        numbers = uniforms(samples.seed, Stream.COLOR, samples.epoch, samples.positions, self.transform.num_uniforms)
        return self.transform(images, torch.from_numpy(numbers).float().to(self.device))
