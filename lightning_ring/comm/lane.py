"""Where collectives run one after another; those of two lanes are on the wire at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm import ring
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.waiting import Patience

# A choice takes this into account of what went before: a lane that once carried a large tensor is long free again.
_REMEMBERED_BYTES = 16 * 1024 * 1024


class Lane:
    """A thread, and a `PointToPoint` whose messages have a tag of their own, over a transport that lanes share.

    Attributes:
        thread: What runs the lane's collectives.
        landing: Memory of `ring.scratch_bytes`.
    """

    def __init__(self, transport: ring.PointToPoint, tag: int, patience: Patience) -> None:
        self.thread = CollectiveThread(patience)
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport
        self._tag = tag
        self._landing = torch.empty(0, dtype=torch.uint8)

    @property
    def landing(self) -> Tensor:
        if not self._landing.numel():  # kept: fresh memory costs a page fault for every 4 KiB
            self._landing = torch.empty(ring.scratch_bytes(), dtype=torch.uint8)
        return self._landing

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> ring.Request:
        return self._transport.isend(tensor, dst, self._tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> ring.Request:
        return self._transport.irecv(tensor, src, self._tag)

    def wait(self, requests: Sequence[Any]) -> None:
        self._transport.wait(requests)


class Lanes:
    """Chooses the lane of each collective, by what all ranks know alike: how many bytes each lane was given."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = list(lanes)
        self._ahead = [0] * len(lanes)  # bytes that this lane was given more than the one with the fewest

    def next(self, num_bytes: int) -> Lane:
        chosen = self._ahead.index(min(self._ahead))
        self._ahead[chosen] += num_bytes
        fewest = min(self._ahead)
        self._ahead = [min(ahead - fewest, _REMEMBERED_BYTES) for ahead in self._ahead]
        return self._lanes[chosen]

    @property
    def first(self) -> Lane:
        return self._lanes[0]

    @property
    def threads(self) -> list[CollectiveThread]:
        return [lane.thread for lane in self._lanes]

    def of_this_thread(self) -> Lane:
        """The lane whose thread calls; the first, if it is another thread."""
        current = threading.current_thread()
        return next((lane for lane in self._lanes if lane.thread.is_run_by(current)), self.first)
