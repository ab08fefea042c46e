"""The tensors in memory that all ranks of a node see, and their counterparts on the other ranks."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ring.comm.communicator import shard_bounds

_OFFSET_BITS = 40
_MAX_VIEWS = 1024  # a region's; cutting them takes longer than a short collective


class Region(NamedTuple):
    """One allocation."""

    number: int  # the same on every rank
    start: int  # where it begins and ends in this process
    stop: int
    memory: list[Tensor]  # all ranks' memory of it as bytes (own: empty)
    # of others' memory (own: empty), with their bounds
    views: dict[Any, tuple[int, int, list[Tensor]]]


class Regions:
    """The allocations of one rank. All ranks add theirs in the same order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # in ascending order; replaced, as `_forget` may run in any thread
        self._starts: tuple[int, ...] = ()
        self._by_start: dict[int, Region] = {}
        self._by_number: dict[int, Region] = {}
        self._num_added = 0

    def add(self, maps: Sequence[mmap.mmap | memoryview], dtype: torch.dtype) -> Tensor:
        """All of this rank's map as a tensor; the region is forgotten, and its memory unmapped,
        with the last view.
        """
        self._num_added += 1
        own = maps[self._rank]
        tensor = torch.frombuffer(own, dtype=dtype)
        # a view of its own memory would keep it for ever
        nothing = torch.empty(0, dtype=torch.uint8)
        memory = [
            nothing if theirs is own else torch.frombuffer(theirs, dtype=torch.uint8)
            for theirs in maps
        ]
        start = tensor.data_ptr()
        region = Region(self._num_added, start, start + tensor.nbytes, memory, {})
        self._by_start[start] = self._by_number[region.number] = region
        self._starts = tuple(sorted(self._by_start))
        weakref.finalize(own, self._forget, start, region.number).atexit = False
        return tensor

    def _forget(self, start: int, number: int) -> None:
        self._by_number.pop(number, None)
        region = self._by_start.get(start)
        # the address may have been given out anew
        if region is not None and region.number == number:
            del self._by_start[start]
            self._starts = tuple(sorted(self._by_start))

    def location(self, flat: Tensor) -> int:
        """Region and offset of ``flat`` in one number: the same for counterparts on all ranks, 0
        outside of regions.
        """
        address = flat.data_ptr()
        starts = self._starts
        index = bisect_right(starts, address)
        region = self._by_start.get(starts[index - 1]) if index else None
        if region is None or address >= region.stop:
            return 0
        if flat.is_conj() or flat.is_neg():  # its bytes are not its values
            return 0
        return (region.number << _OFFSET_BITS) + address - region.start

    def all_ranks(self, flat: Tensor, location: int, index: int | None = None) -> list[Tensor]:
        """By rank, the counterparts of 1-D ``flat``, which lies at ``location``; or their
        ``index``-th shards.
        """
        region = self._by_number[location >> _OFFSET_BITS]
        key = location, flat.numel(), flat.dtype, index
        cut = region.views.get(key)
        if cut is None:
            if len(region.views) >= _MAX_VIEWS:
                region.views.clear()
            cut = region.views[key] = _cut(
                region.memory, flat, location & ((1 << _OFFSET_BITS) - 1), index
            )
        start, stop, views = cut
        everyones = views.copy()
        everyones[self._rank] = flat[start:stop]
        return everyones


def _cut(
    memory: Sequence[Tensor], flat: Tensor, offset: int, index: int | None
) -> tuple[int, int, list[Tensor]]:
    """The bounds of shard ``index`` of ``flat``, or of all of it, and that part of all
    ``memory``.
    """
    start, stop = (
        (0, flat.numel()) if index is None else shard_bounds(flat.numel(), len(memory), index)
    )
    first, last = (offset + bound * flat.itemsize for bound in (start, stop))
    return start, stop, [bytes_[first:last].view(flat.dtype) for bytes_ in memory]
