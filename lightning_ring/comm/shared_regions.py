"""Which tensors lie in memory that all ranks of a node see, and where the other ranks' counterparts are."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_OFFSET_BITS = 40


class Region(NamedTuple):
    """One allocation: its number, the same on every rank, and all ranks' memory of it as bytes (own: empty)."""

    number: int
    memory: list[Tensor]


class Regions:
    """The allocations of one rank. All ranks add theirs in the same order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._by_start: dict[int, Region] = {}
        self._num_added = 0

    def add(self, maps: Sequence[mmap.mmap], dtype: torch.dtype) -> Tensor:
        """All of this rank's map as a tensor; the region is forgotten, and its memory unmapped, with the last view."""
        self._num_added += 1
        own = maps[self._rank]
        tensor = torch.frombuffer(own, dtype=dtype)
        nothing = torch.empty(0, dtype=torch.uint8)  # a view of its own memory would keep it for ever
        memory = [nothing if theirs is own else torch.frombuffer(theirs, dtype=torch.uint8) for theirs in maps]
        start = tensor.data_ptr()
        self._by_start[start] = Region(self._num_added, memory)
        weakref.finalize(own, self._forget, start, self._num_added).atexit = False
        return tensor

    def _forget(self, start: int, number: int) -> None:
        region = self._by_start.get(start)
        if region is not None and region.number == number:  # the address may have been given out anew
            del self._by_start[start]

    def place(self, flat: Tensor) -> int:
        """Region and offset of ``flat`` in one number, equal on ranks that mean the same place; 0 if it is in none."""
        if flat.is_conj() or flat.is_neg():  # its bytes are not its values
            return 0
        start = flat.untyped_storage().data_ptr()
        region = self._by_start.get(start)
        return 0 if region is None else (region.number << _OFFSET_BITS) + flat.data_ptr() - start

    def everyones(self, flat: Tensor) -> list[Tensor]:
        """What all ranks, by rank, have in the place of contiguous ``flat``, which is in a region."""
        start = flat.untyped_storage().data_ptr()
        offset = flat.data_ptr() - start
        everyones = [memory[offset : offset + flat.nbytes] for memory in self._by_start[start].memory]
        return [flat if rank == self._rank else bytes_.view(flat.dtype) for rank, bytes_ in enumerate(everyones)]
