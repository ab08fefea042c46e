"""Channels: collectives of one channel run one after another, those of two channels at the same
time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm import ring
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.transport import PointToPoint, Request
from lightning_ring.comm.waiting import WaitPolicy

# A choice takes this into account of what went before: a channel that once carried a large tensor
# is long free again.
_REMEMBERED_BYTES = 16 * 1024 * 1024


class Channel:
    """A thread, and a `PointToPoint` whose messages have a tag of their own, over a transport that
    channels share.

    ``landing`` is memory of `ring.scratch_bytes`.
    """

    def __init__(self, transport: PointToPoint, tag: int, policy: WaitPolicy) -> None:
        self.thread = CollectiveThread(policy)
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

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request:
        return self._transport.isend(tensor, dst, self._tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Request:
        return self._transport.irecv(tensor, src, self._tag)

    def wait(self, requests: Sequence[Any]) -> None:
        self._transport.wait(requests)


class ChannelSelector:
    """Chooses the channel of each collective by the bytes that each was given, a number that all
    ranks know alike.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        # bytes that this channel was given more than the one with the fewest
        self._ahead = [0] * len(channels)

    def next(self, num_bytes: int) -> Channel:
        chosen = self._ahead.index(min(self._ahead))
        self._ahead[chosen] += num_bytes
        fewest = min(self._ahead)
        self._ahead = [min(ahead - fewest, _REMEMBERED_BYTES) for ahead in self._ahead]
        return self._channels[chosen]

    @property
    def first(self) -> Channel:
        return self._channels[0]

    def of_this_thread(self) -> Channel:
        """The channel whose thread calls; the first, if it is another thread."""
        current = threading.current_thread()
        return next(
            (channel for channel in self._channels if channel.thread.is_run_by(current)), self.first
        )
