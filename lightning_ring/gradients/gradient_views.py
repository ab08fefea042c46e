"""Views of a bucket's memory that serve as gradients, and detection of other code that holds
them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
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
