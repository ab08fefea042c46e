"""Shared memory that outlives a communicator, for ranks that go on when another one dies.

Reserving and mapping memory anew is slow. The survivors keep what they share, and drop only the
maps of ranks that are gone.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ring.comm.backends.shared_memory.memory import Bootstrap, share_named

_GRAIN = 64 * 1024  # a bucket is a few elements longer or shorter with another number of ranks


@dataclass(slots=True)
class _Block:
    num_bytes: int
    maps: dict[int, mmap.mmap]  # by member
    lent: bool = False  # a tensor of this process uses it
    wanted: bool = True  # it was lent in this generation

    def give_back(self) -> None:
        self.lent = False


class KeptMemory:
    """Memory by member: a member's number stays when its rank changes. Call `regroup` first."""

    def __init__(self) -> None:
        self._members: tuple[int, ...] = ()
        self._blocks: dict[str, _Block] = {}  # by the name that all members know

    def regroup(self, members: Sequence[int]) -> None:
        """Begin a generation of ``members``, by rank. Drop others' maps, and memory that the last
        generation did not use or a newcomer lacks.
        """
        self._members = tuple(members)
        for name, block in list(self._blocks.items()):
            if not block.wanted or not set(members) <= block.maps.keys():
                del self._blocks[name]
                continue
            block.maps = {member: block.maps[member] for member in members}
            block.wanted = block.lent

    def share(self, bootstrap: Bootstrap, num_bytes: int) -> list[mmap.mmap | memoryview]:
        """As `memory.share`, but reuse memory that no rank has lent. Collective."""
        fitting = {
            name: block.num_bytes
            for name, block in self._blocks.items()
            if not block.lent and num_bytes <= block.num_bytes <= 2 * (num_bytes + _GRAIN)
        }
        offers: list[list[str]] = bootstrap.all_gather_object(sorted(fitting))
        common = set(offers[0]).intersection(*offers[1:])
        if common:
            name = min(common, key=lambda name: (fitting[name], name))
        else:
            reserved = (num_bytes // _GRAIN + 2) * _GRAIN
            name, maps = share_named(bootstrap, reserved)
            self._blocks[name] = _Block(reserved, dict(zip(self._members, maps, strict=True)))
        block = self._blocks[name]
        block.lent = block.wanted = True
        mine = self._members[bootstrap.rank]
        # it ends with the last tensor that uses it
        own = memoryview(block.maps[mine])[:num_bytes]
        weakref.finalize(own, block.give_back).atexit = False
        return [own if member == mine else block.maps[member] for member in self._members]
