"""Batches on their device: copied there, normalised and mixed; their memory is reused."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ring.data.loading.augment import Transform, name_of, transform_batch
from lightning_ring.data.loading.loader import Samples
from lightning_ring.data.loading.transforms import DeviceTransform
from lightning_ring.data.sampling.counters import Stream, integers, uniforms
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import gpu_module, is_gpu

_SPARE = 8  # buffers: when many batches are let go at once, the others are freed


@dataclass(slots=True)
class Memory:
    """Room for a batch of decoded images, in each of the sizes that they are cropped to."""

    views: list[Tensor]  # each batch size x 3 x height x width, uint8, channels last
    places: list[tuple[Tensor, ...]]  # of each sample: its images, each 1 x 3 x height x width
    copied: Any = None  # an event: the device has read it

    def of(self, num: int) -> list[Tensor]:
        """The views of the first ``num`` samples."""
        return [view[:num] for view in self.views]


class Buffers:
    """Memory that is given back for the next batch.

    Args:
        sizes: Heights and widths.
        pinned: For copies to a GPU.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], pinned: bool) -> None:
        self.sizes = sizes
        self.pinned = pinned
        self._free: deque[Memory] = deque(maxlen=_SPARE)

    def take(self, num: int) -> Memory:
        """Memory for ``num`` samples, or more, that nobody uses."""
        memory = self._free.popleft() if self._free else None
        if memory is None or len(memory.places) < num:  # of a smaller batch
            # an evaluation's, in which the next training would not write
            with torch.inference_mode(False):
                views = [self._view(num, *size) for size in self.sizes]
                memory = Memory(views, list(zip(*(view.split(1) for view in views), strict=True)))
        if memory.copied is not None:
            memory.copied.synchronize()
        return memory

    def _view(self, num: int, height: int, width: int) -> Tensor:
        rows = torch.empty((num, height, width, 3), dtype=torch.uint8, pin_memory=self.pinned)
        return rows.permute(0, 3, 1, 2)

    def give_back(self, memory: Memory) -> None:
        self._free.append(memory)


def lend(memory: Tensor, release: Callable[[], object]) -> Tensor:
    """A tensor over ``memory`` (contiguous, on the CPU), which is filled again: to the kernel,
    fresh pages cost more.

    ``release`` is called when the tensor, its views and arrays made of them are gone, in the thread
    of the last one.
    """
    with torch.inference_mode(False):
        array = memory.view(torch.uint8).numpy()  # numpy knows no bfloat16
        lent = torch.from_numpy(array).view(memory.dtype)
    weakref.finalize(array, release).atexit = False
    return lent


def last_of(num: int, release: Callable[[], object]) -> Callable[[], None]:
    """A function whose call number ``num`` calls ``release``, from whichever threads they come."""
    left = list(range(num))

    def called() -> None:
        if left.pop() == 0:
            release()

    return called


_SPARE = 8  # buffers: when many batches are let go at once, the others are freed


class OnDevice:
    """Brings views (batch x 3 x height x width, uint8, channels last) to ``device``.

    Args:
        transform: Run on each view; `None` leaves uint8 images.
        batch_transform: Run after it on each view and the labels.
        buffers: Where the views' memory goes when it is free.
    """

    def __init__(
        self,
        device: torch.device,
        transform: DeviceTransform | None,
        batch_transform: Transform | None,
        buffers: Buffers,
    ) -> None:
        self.device = device
        self.transform = transform.to(device) if transform is not None else None
        self.batch_transform = batch_transform
        if isinstance(batch_transform, nn.Module):
            batch_transform.to(device)
        self.buffers = buffers
        self.on_gpu = is_gpu(device)
        self._stream: Any = None
        # of each view, on a CPU
        self._floats = [deque[Tensor](maxlen=_SPARE) for _ in buffers.sizes]

    def start(
        self, memory: Memory, samples: Samples, numbers: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views and ``numbers`` (labels first; one for each sample) on their way to the device."""
        if not self.on_gpu:
            views = self._views_on_host(memory, samples)
            return self._mixed(views, [tensor.to(self.device) for tensor in numbers], samples)
        gpu = gpu_module(self.device)
        if self._stream is None:
            self._stream = gpu.Stream(self.device)
        with gpu.stream(self._stream):
            views = [view.to(self.device, non_blocking=True) for view in memory.of(len(samples))]
            copied = memory.copied = gpu.Event()
            copied.record()
            views = [self._transformed(view, samples, i) for i, view in enumerate(views)]
            sent = [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in numbers]
            made = self._mixed(views, sent, samples)
        self.buffers.give_back(memory)
        return made

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Let the caller's stream use ``tensors``, which `start` made."""
        if self._stream is not None:
            current = gpu_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in tensors:
                tensor.record_stream(current)

    def _views_on_host(self, memory: Memory, samples: Samples) -> list[Tensor]:
        views = memory.of(len(samples))
        if self.transform is None and self.device.type == "cpu":
            release = last_of(len(views), partial(self.buffers.give_back, memory))
            return [lend(view.permute(0, 2, 3, 1), release).permute(0, 3, 1, 2) for view in views]
        views = [
            self._transformed(view.to(self.device), samples, i) for i, view in enumerate(views)
        ]
        self.buffers.give_back(memory)
        return views

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
        free = self._floats[view]
        memory = free.popleft() if free else None
        if memory is None or len(memory) < len(images):
            with torch.inference_mode(False):
                memory = torch.empty(images.permute(0, 2, 3, 1).shape, dtype=self.transform.dtype)
        out = lend(memory[: len(images)], partial(free.append, memory))
        return self.transform(images, numbers, out=out.permute(0, 3, 1, 2))

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
