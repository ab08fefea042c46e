"""Views of a bucket's memory that are handed out as gradients, and whether somebody still holds that memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class LentViews:
    """``views`` once more, for ``param.grad``: in a storage of their own over the same memory.

    A communicator, or a thread of it, may keep aliases of ``flat`` for a while after a collective. They are in the
    storage of ``flat``, so that the counts here see code outside lightning_ring only: the Python objects, the tensors
    behind them (autograd saves those), and the aliases of their memory (``detach()``, ``view()``, ``numpy()``, an
    optimizer's state).
    """

    def __init__(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        memory = torch.from_dlpack(flat)
        start = flat.storage_offset()
        # `.data`: each with a version of its own, so that a change of one gradient does not look like one of all
        self.views = [memory.as_strided(v.size(), v.stride(), int(v.storage_offset()) - start).data for v in views]
        self._storage = memory.untyped_storage()
        del memory
        self._unheld = self._counts()

    def are_held(self) -> bool:
        """Whether anything but this object refers to the memory, a ``param.grad`` as well."""
        return self._counts() != self._unheld

    def _counts(self) -> list[int]:
        views = self.views
        return [
            *map(sys.getrefcount, views),
            *map(Tensor._use_count, views),
            *map(weakref.getweakrefcount, views),
            sys.getrefcount(self._storage),
            torch._C._storage_Use_Count(self._storage._cdata),
        ]


def are_held(tensors: Sequence[Tensor]) -> list[bool]:
    """For each of ``tensors`` whether anything refers to it but that list and one place in the caller.

    Aliases of its memory are not looked for: autograd itself has one during the hook that a gradient calls.
    """
    alone = torch.empty(0)
    (unheld,) = _references([alone])
    return [references != unheld for references in _references(tensors)]


def _references(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    counts = (map(sys.getrefcount, tensors), map(Tensor._use_count, tensors), map(weakref.getweakrefcount, tensors))
    return list(zip(*counts, strict=True))
