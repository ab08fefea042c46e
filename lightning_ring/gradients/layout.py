"""Which parameters share a bucket, and in which order buckets leave: the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.bucket import Bucket, plan_buckets
from lightning_ring.gradients.sizing.auto_buckets import AutoBuckets


class BucketLayout:
    """First the reverse of registration; after the first backward the order in which rank 0's gradients came; later,
    once, the sizes that ``auto`` chooses.

    Args:
        comm: Who takes part.
        cap_mb: Bucket size in MiB.
        auto: Who chooses other sizes after `backwards_before_auto` backward passes.
    """

    backwards_before_auto: ClassVar[int] = 4  # the first warms up; the others are measured

    def __init__(self, comm: Communicator, cap_mb: float, auto: AutoBuckets | None) -> None:
        self._comm = comm
        self._cap_mb = cap_mb
        self._auto = auto
        self._order: list[str] | None = []  # order of the first backward's gradients; None once it was used

    @property
    def settled(self) -> bool:
        """Whether buckets have their last layout: nothing is noted any more."""
        return self._order is None and self._auto is None

    def plan(self, params: Sequence[tuple[str, Parameter]]) -> list[Bucket]:
        """Buckets of ``params``, in their order."""
        return plan_buckets(params, self._cap_mb, empty=self._comm.empty, num_shards=self._comm.world_size)

    def begin_backward(self, device: torch.device) -> None:
        """Now a backward begins, of gradients on ``device``."""
        if self._auto is not None:
            self._auto.begin_backward(device)

    def note(self, name: str, device: torch.device) -> None:
        """Now the gradient of ``name`` is there."""
        if self._order is not None:
            self._order.append(name)
        if self._auto is not None:
            self._auto.note(name, device)

    def revise(self, buckets: Sequence[Bucket], num_finished: int) -> list[Bucket] | None:
        """Between two backward passes: what ``buckets`` are to be replaced by, `None` to keep them. Collective.

        ``num_finished`` backward passes were reduced so far.
        """
        if self._auto is not None and num_finished >= self.backwards_before_auto:
            auto, self._auto, self._order = self._auto, None, None
            return auto.build(_members(buckets)) if buckets else None  # none: all gradients are sparse
        if self._order is None or not num_finished:
            return None
        order, self._order = self._order, None
        if self._auto is not None:
            self._auto.forget()  # the first backward is slower than all that follow
        position = {name: index for index, name in enumerate(self._comm.broadcast_object(order))}
        now = _members(buckets)
        then = sorted(now, key=lambda pair: position.get(pair[0], len(position)))
        return self.plan(then) if [name for name, _ in then] != [name for name, _ in now] else None

    def settle(self) -> bool:
        """Stay with the layout at hand; whether that can be, or ``auto`` has yet to choose sizes."""
        if self._auto is not None:
            return False
        self._order = None
        return True


def _members(buckets: Sequence[Bucket]) -> list[tuple[str, Parameter]]:
    return [pair for bucket in buckets for pair in zip(bucket.names, bucket.params, strict=True)]
