"""Batches on their device: copied there, normalised and mixed; their memory is reused."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ring.data.loading.augment import Transform, name_of, transform_batch
from lightning_ring.data.loading.loader import Samples
from lightning_ring.data.loading.transforms import DeviceTransform
from lightning_ring.data.sampling.counters import Stream, integers, uniforms
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import gpu_module, is_gpu

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
