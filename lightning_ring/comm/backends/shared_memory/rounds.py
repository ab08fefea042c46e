"""Rounds through shared memory: each rank writes, announces it, and reads the others.

A round ends where the next one begins, so two places to write to are enough: what a rank wrote for
round k stands until it writes for round k+2, which it does after all arrived at k+1, which they do
after reading what was written for k.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

SLOT_BYTES = 512 * 1024
BOARD_BYTES = 4096
SEGMENT_BYTES = BOARD_BYTES + 2 * SLOT_BYTES

# A board's words of 8 bytes, in one cache line: the round its rank arrived at; nothing; then for
# even and for odd rounds a digest of the collective; then for both where in shared memory the
# rank's tensor is.
_WORDS = 8
_MAX_VIEWS = 1024


class Rounds:
    """One rank's side. ``maps`` are the segments of all ranks, of `SEGMENT_BYTES` each, zero at the
    start.

    Words are written and read by single aligned instructions. On x86-64 other processors see a
    rank's writes in the order of the program, so that whoever sees its arrival sees what it wrote
    before.
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
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}

    def next_slots(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The first ``numel`` elements of everybody's slot for the next round."""
        parity = (self.number + 1) & 1
        views = self._views.get((dtype, numel, parity))
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            views = [slot[: numel * dtype.itemsize].view(dtype) for slot in self.slots[parity]]
            self._views[dtype, numel, parity] = views
        return views

    def announce(self, digest: int, location: int) -> None:
        """What the others find on the board from the next round on (`agree`, `same_location`)."""
        self._digest, self._location = digest, location

    def arrive(self) -> int:
        """Say that this rank has written all it wants to in the next round; returns the round's
        number.
        """
        number = self.number + 1
        words = self._mine
        words[2 + (number & 1)] = self._digest
        words[4 + (number & 1)] = self._location
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

    def agree(self) -> bool:
        """Whether everybody gave the same digest for the round that was just reached."""
        return self._all_wrote(2 + (self.number & 1))

    def same_location(self) -> bool:
        """Whether everybody gave the same location for the round that was just reached."""
        return self._all_wrote(4 + (self.number & 1))

    def _all_wrote(self, word: int) -> bool:
        mine = self._mine[word]
        for board in self._others:  # noqa: SIM110
            if board[word] != mine:
                return False
        return True
