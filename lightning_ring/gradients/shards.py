"""Averages of which each rank keeps its shard: the first half of an all-reduce, for a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import ReduceOp, Work, shard_bounds
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sending import FollowedWork


class ShardReducer(Reducer):
    """A `Reducer` that scatters: ``param.grad`` holds averages in this rank's shard of each bucket, and only there.

    The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``; the rest of a gradient is
    scratch. The first backward still reduces to all ranks, because buckets are filled anew after it, in the order in
    which its gradients came; from then on they stay as they are, so that optimizer state can be cut along them. (With
    ``auto`` the first few do, until sizes are chosen.)

    Which parameters some rank used, and whether some rank was asked to stop, travels once a backward, behind the last
    bucket: of a bucket's own flags only one rank would see the sum.

    Attributes:
        settled: Whether buckets have their last layout.
        on_gradient: Called with each parameter that gets a gradient, before it does, if set.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settled = False
        self.on_gradient: Callable[[Parameter], None] | None = None
        self._aside: dict[Parameter, Tensor] = {}  # this rank's part of averages that a later backward adds to
        super().__init__(*args, **kwargs)

    def track(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[Parameter]:
        new = super().track(named_parameters)
        for param in new:
            self._hooks.append(param.register_hook(partial(self._before_gradient, param)))
        return new

    def finish(self) -> None:
        if not self._active:
            return
        super().finish()
        self._ready.clear()  # `_before_gradient` of the next backward looks at it before that has begun
        self._add_what_was_set_aside()
        self.settle()

    def settle(self) -> None:
        """Give buckets their last layout, if they do not have it yet. Collective; the gradients move with them."""
        if self.settled:
            return
        before = self.buckets
        self._revise_layout()
        self.settled = self._layout.settle()
        if self.buckets is before:
            return
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param.grad is not None and param not in self._unsent:
                    param.grad = view.copy_(param.grad)

    def part_of(self, param: Parameter) -> tuple[Bucket, int, int]:
        """Where this rank's part of ``param`` lies in its bucket's ``flat``: from, and up to; they may be equal."""
        bucket, index = self._slots[param]
        first, last = shard_bounds(bucket.flat.numel(), self._comm.world_size, self._comm.shard_index)
        offset = int(bucket.views[index].storage_offset() - bucket.flat.storage_offset())
        start = min(max(first, offset), offset + param.numel())
        return bucket, start, max(start, min(last, offset + param.numel()))

    def is_view(self, param: Parameter) -> bool:
        """Whether ``param.grad`` lies in its bucket."""
        view, grad = self._view_of(param), param.grad
        return grad is not None and grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()

    def bring_back(self, param: Parameter) -> None:
        """Put ``param.grad`` into its bucket, where it is a tensor of the user's (``param.grad = ...``)."""
        if param.grad is not None and not self.is_view(param):
            param.grad = self._view_of(param).copy_(param.grad)

    def _view_of(self, param: Parameter) -> Tensor:
        bucket, index = self._slots[param]
        return bucket.views[index]

    def _send(self, bucket: Bucket, name: str) -> Work:
        if not self.settled:
            return super()._send(bucket, name)
        ranks, comm, flat = self.active_ranks, self._comm, bucket.flat
        if self._compressor is not None and self._compressor.accepts(flat.dtype):
            return self._compressor.reduce_scatter(bucket, comm, divisor=ranks or comm.world_size, name=name)
        if ranks is None:
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        return FollowedWork(comm.reduce_scatter_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(ranks))

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        for param in bucket.params:
            if param not in self._ready:
                self._set_aside(param)
        super()._launch()
        if self.settled and self._next == len(self._queue):
            self._works.append((bucket, self._send_flags()))

    def _send_flags(self) -> Work:
        flags = [part for bucket in self._queue for part in (bucket.wire.used, bucket.wire.stop)]
        targets = [part for bucket in self._queue for part in (bucket.used, bucket.stop)]
        device = self._queue[0].flat.device
        vector = torch.cat([part.to(device, torch.float32) for part in flags])
        parts = vector.split([part.numel() for part in flags])
        return FollowedWork(
            self._comm.all_reduce_(vector, name="flags"), lambda: torch._foreach_copy_(targets, list(parts))
        )

    def _before_gradient(self, param: Parameter, _: Tensor) -> None:
        if self._discarding:
            return
        if self.on_gradient is not None:
            self.on_gradient(param)
        if param not in self._ready:
            self._set_aside(param)

    def _set_aside(self, param: Parameter) -> None:
        """Move an average that ``param.grad`` still holds out of the way: outside this rank's shard it is scratch."""
        if param.grad is None:
            self._aside.pop(param, None)  # the user dropped the gradient meanwhile
        elif self.settled and param not in self._unsent and self.is_view(param):
            bucket, start, stop = self.part_of(param)
            self._aside[param] = bucket.flat[start:stop].clone()
            param.grad = None

    def _add_what_was_set_aside(self) -> None:
        aside, self._aside = self._aside, {}
        for param, part in aside.items():
            bucket, start, stop = self.part_of(param)
            if not bucket.launched:  # it stayed at home
                self._aside[param] = part
                continue
            bucket.flat[start:stop].add_(part)
            param.grad = self._view_of(param)
