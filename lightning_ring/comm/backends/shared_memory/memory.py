"""Memory that the ranks of a node share: its segments, rounds through them, and tensors in it.

In a round each rank writes, announces it, and reads the others. Two places to write to are enough:
a rank overwrites round k in round k+2, after all arrived at k+1, and hence have read round k.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import platform
import secrets
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ring.comm.calls import by_rank
from lightning_ring.comm.communicator import shard_bounds

_PREFIX = "lightning_ring"


class Bootstrap(Protocol):
    """What ranks need to meet: a `Communicator` over just them, or a `StoreBootstrap`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...


class NoSharedMemory(Exception):
    """Some rank could not make or map the memory. The text is the same on every rank."""


def share(bootstrap: Bootstrap, num_bytes: int) -> list[mmap.mmap]:
    """Every rank's new memory of ``num_bytes``, by rank, mapped and reserved. Collective."""
    return share_named(bootstrap, num_bytes)[1]


def share_named(bootstrap: Bootstrap, num_bytes: int) -> tuple[str, list[mmap.mmap]]:
    """As `share`, with a unique name of the memory, the same on every rank."""
    file, offer = _make(num_bytes)
    try:
        offers = bootstrap.all_gather_object(offer)
        _raise_if_any([offer.get("error", "") for offer in offers])
        maps, error = list[mmap.mmap](), ""
        try:
            maps = [_map(offer["path"], offer["name"], num_bytes) for offer in offers]
        except (OSError, ValueError) as problem:
            error = f"opening another rank's memory failed: {problem}"
        # Until here the others need this descriptor.
        _raise_if_any(bootstrap.all_gather_object(error))
        return offers[0]["name"], maps
    finally:
        if file is not None:
            os.close(file)


def _make(num_bytes: int) -> tuple[int | None, dict[str, Any]]:
    """A new file, and where it is or why there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        # Elsewhere a flag may overtake the data written before it, and Python has no fence.
        return None, {"error": f"it is used on x86-64 only, and this is {platform.machine()}"}
    if not hasattr(os, "memfd_create"):
        return None, {"error": "this system has no memfd_create (Linux has)"}
    name = f"{_PREFIX}-{secrets.token_hex(8)}"
    file = None
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        # an error now, where a missing page later would be a SIGBUS
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if file is not None:
            os.close(file)
        return None, {"error": f"reserving {num_bytes / 2**20:.3g} MiB failed: {error}"}
    return file, {"path": f"/proc/{os.getpid()}/fd/{file}", "name": name}


def _map(path: str, name: str, num_bytes: int) -> mmap.mmap:
    target = os.readlink(path)
    if name not in target:  # in another PID namespace the number is another process's
        raise ValueError(
            f"{path} is {target} here, not {name}; the ranks live in containers with "
            "separate processes"
        )
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(file)


def _raise_if_any(errors: list[str]) -> None:
    if any(errors):
        raise NoSharedMemory(by_rank([error or "no error" for error in errors]))


# -- rounds

SLOT_BYTES = 512 * 1024
BOARD_BYTES = 4096
SEGMENT_BYTES = BOARD_BYTES + 2 * SLOT_BYTES

# A board's words of 8 bytes, in one cache line: the round its rank arrived at; nothing; then for
# even and for odd rounds a digest of the collective; then for both where in shared memory the
# rank's tensor is.
_WORDS = 8
DIGEST, LOCATION = 2, 4
_MAX_VIEWS = 1024  # that are kept: cutting them takes longer than a short collective


class Rounds:
    """One rank's side. ``maps`` are the segments of all ranks, of `SEGMENT_BYTES` each, zero at the
    start.

    Words are written and read by single aligned instructions. x86-64 shows a rank's writes in the
    order of the program: whoever sees its arrival sees what it wrote before.
    """

    def __init__(self, rank: int, maps: Sequence[mmap.mmap]) -> None:
        self.rank = rank
        self.world_size = len(maps)
        self.number = 0
        self._digest = self._location = 0
        boards = [memoryview(segment)[: 8 * _WORDS].cast("q") for segment in maps]
        self._mine = boards[rank]
        self._boards = boards
        self._others = [board for peer, board in enumerate(boards) if peer != rank]
        self.slots = [
            [
                torch.frombuffer(segment, dtype=torch.uint8, offset=start, count=SLOT_BYTES)
                for segment in maps
            ]
            for start in (BOARD_BYTES, BOARD_BYTES + SLOT_BYTES)
        ]
        """``slots[parity of the round][rank]``"""
        self._views = functools.lru_cache(_MAX_VIEWS)(self._cut_slots)

    def next_slots(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """``numel`` elements of each rank's slot for the next round."""
        return self._views((self.number + 1) & 1, dtype, numel)

    def _cut_slots(self, parity: int, dtype: torch.dtype, numel: int) -> list[Tensor]:
        return [slot[: numel * dtype.itemsize].view(dtype) for slot in self.slots[parity]]

    def announce(self, digest: int, location: int) -> None:
        """What the others find on the board from the next round on (`all_wrote`)."""
        self._digest, self._location = digest, location

    def arrive(self) -> int:
        """Announce that this rank has written for the next round; returns the round's number."""
        number = self.number + 1
        words = self._mine
        words[DIGEST + (number & 1)] = self._digest
        words[LOCATION + (number & 1)] = self._location
        words[0] = number
        self.number = number
        return number

    def reached(self, number: int) -> bool:
        for board in self._others:  # noqa: SIM110  (`all` with a generator takes twice as long)
            if board[0] < number:
                return False
        return True

    def missing(self, number: int) -> list[int]:
        return [rank for rank, board in enumerate(self._boards) if board[0] < number]

    def all_wrote(self, word: int) -> bool:
        """Whether all ranks gave the same `DIGEST`, or `LOCATION`, for the round just reached."""
        word += self.number & 1
        mine = self._mine[word]
        for board in self._others:  # noqa: SIM110
            if board[word] != mine:
                return False
        return True


# -- tensors

_OFFSET_BITS = 40


class Region(NamedTuple):
    """One allocation."""

    start: int  # where it begins in this process
    number: int  # the same on every rank
    stop: int
    memory: list[Tensor]  # all ranks' memory of it as bytes (own: empty)
    # of others' memory (own: empty), with their bounds
    views: dict[Any, tuple[int, int, list[Tensor]]]


class Regions:
    """The allocations of one rank. All ranks add theirs in the same order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._by_number: dict[int, Region] = {}
        # by their starts; replaced, as `_forget` may run in any thread
        self._sorted: list[Region] = []
        self._num_added = 0

    def add(self, maps: Sequence[mmap.mmap | memoryview], dtype: torch.dtype) -> Tensor:
        """This rank's map as a tensor. The memory is unmapped with its last view."""
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
        region = Region(start, self._num_added, start + tensor.nbytes, memory, {})
        self._by_number[region.number] = region
        self._sorted = sorted(self._by_number.values())
        weakref.finalize(own, self._forget, region.number).atexit = False
        return tensor

    def _forget(self, number: int) -> None:
        self._by_number.pop(number, None)
        self._sorted = sorted(self._by_number.values())

    def location(self, flat: Tensor) -> int:
        """Region and offset of ``flat`` in one number, equal on all ranks; 0 outside regions."""
        address, regions = flat.data_ptr(), self._sorted
        # the last one, if its memory was given out anew
        index = bisect_right(regions, (address, math.inf))
        if not index or address >= regions[index - 1].stop:
            return 0
        if flat.is_conj() or flat.is_neg():  # its bytes are not its values
            return 0
        region = regions[index - 1]
        return (region.number << _OFFSET_BITS) + address - region.start

    def all_ranks(self, flat: Tensor, location: int, index: int | None = None) -> list[Tensor]:
        """By rank, the counterparts of 1-D ``flat`` at ``location``, or their ``index``-th
        shards.
        """
        region = self._by_number[location >> _OFFSET_BITS]
        key = location, flat.numel(), flat.dtype, index
        cut = region.views.get(key)
        if cut is None:
            if len(region.views) >= _MAX_VIEWS:
                region.views.clear()
            start, stop = 0, flat.numel()
            if index is not None:
                start, stop = shard_bounds(stop, len(region.memory), index)
            offset = location & ((1 << _OFFSET_BITS) - 1)
            first, last = (offset + bound * flat.itemsize for bound in (start, stop))
            others = [bytes_[first:last].view(flat.dtype) for bytes_ in region.memory]
            cut = region.views[key] = start, stop, others
        start, stop, views = cut
        everyones = views.copy()
        everyones[self._rank] = flat[start:stop]
        return everyones
