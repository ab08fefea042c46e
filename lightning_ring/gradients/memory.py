"""The memory of gradients: views of a bucket, who holds them, tensors that cannot be read, and the
streams that fill a bucket.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

# which stubs of some versions of torch lack
_use_count: Callable[[Tensor], int] = cast(Any, Tensor)._use_count


class LentViews:
    """Copies of ``views`` for ``param.grad``, with a storage of their own over the same memory.

    A communicator may keep aliases of ``flat`` after a collective. They use the storage of
    ``flat``, so that the counts here cover only code outside lightning_ring: Python objects, the
    tensors behind them (autograd saves those), and aliases of their memory (``detach()``,
    ``view()``, ``numpy()``, an optimizer's state).
    """

    def __init__(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        memory = torch.from_dlpack(flat)
        start = flat.storage_offset()
        # `.data`: separate version counters, so that changing one gradient does not mark all as
        # changed
        self.views = [
            memory.as_strided(v.size(), v.stride(), int(v.storage_offset()) - start).data
            for v in views
        ]
        self._storage = memory.untyped_storage()
        del memory
        self._unheld = self._counts()

    def part(self, start: int, stop: int) -> Tensor:
        """Elements of ``flat``, as a further view of the memory. While one of it lives, the
        views are held.
        """
        return self.views[0].as_strided((stop - start,), (1,), start).data

    def are_held(self) -> bool:
        """Whether anything but this object, including a ``param.grad``, refers to the memory."""
        return self._counts() != self._unheld

    def _counts(self) -> list[int]:
        views = self.views
        return [
            *map(sys.getrefcount, views),
            *map(_use_count, views),
            *map(weakref.getweakrefcount, views),
            sys.getrefcount(self._storage),
            torch._C._storage_Use_Count(self._storage._cdata),
        ]


def are_held(tensors: Sequence[Tensor]) -> list[bool]:
    """For each of ``tensors``, whether it has references besides that list and one variable of the
    caller.

    Aliases of its memory do not count: autograd itself has one while it calls a gradient's hook.
    """
    alone = torch.empty(0)
    (unheld,) = _references([alone])
    return [references != unheld for references in _references(tensors)]


def _references(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    counts = (
        map(sys.getrefcount, tensors),
        map(_use_count, tensors),
        map(weakref.getweakrefcount, tensors),
    )
    return list(zip(*counts, strict=True))


def unreadable_like(tensor: Tensor, message: str) -> Tensor:
    """A tensor with the shape, strides, dtype and device of ``tensor`` that has no readable values.

    Access to its memory raises a `RuntimeError` with ``message``: in operators (from Python or not,
    in any thread), NumPy and C++. Its views are unreadable too. It takes no memory.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes()
    )
    unreadable = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    unreadable.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    make_unreadable(unreadable, message)
    return unreadable


def make_unreadable(tensor: Tensor, message: str) -> None:
    """From now on access to the memory of ``tensor`` raises a `RuntimeError` with ``message``."""
    torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, message)


def current_stream(device: torch.device) -> Any:
    """The current stream of ``device``; `None` on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def keep_for(stream: Any, tensor: Tensor) -> None:
    """Have the memory of ``tensor`` go to no other tensor before ``stream`` has read it."""
    tensor.record_stream(stream)


class Fillers:
    """The streams that have computed gradients of a bucket since it was last sent."""

    __slots__ = ("_device", "_has_streams", "_streams")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type != "cpu"
        self._streams: list[Any] = []

    def note(self) -> None:
        """A gradient has just been computed, on the current stream."""
        if not self._has_streams:
            return
        stream = current_stream(self._device)
        if stream not in self._streams:
            self._streams.append(stream)

    def join(self, grads: Iterable[Tensor | None]) -> None:
        """Have the current stream, which is about to read ``grads``, go on after all that
        computed them.
        """
        streams, self._streams = self._streams, []
        if not streams:
            return
        current = current_stream(self._device)
        others = [stream for stream in streams if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for grad in grads:
                if grad is not None:
                    keep_for(current, grad)


def order_after_current(stream: Any, device: torch.device) -> None:
    """Have ``stream`` go on after what the current stream of ``device`` was given so far."""
    if device.type != "cpu" and stream != (current := current_stream(device)):
        stream.wait_stream(current)
