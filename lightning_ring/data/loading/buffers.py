"""Memory of batches, which is filled again and again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
