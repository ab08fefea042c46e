"""Averages gradients so that each rank has its shard: the first half of an all-reduce, for a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import ChainedWork, ReduceOp, Work
from lightning_ring.comm.host_copy import on_host
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.kept_averages import KeptAverages
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sending import scatter_compressed_
from lightning_ring.gradients.shards import GradientShards


class ShardReducer(Reducer):
    """A `Reducer` that scatters: ``param.grad`` holds averages in this rank's shard of each bucket, and only there.

    The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``. The rest of a gradient is NaN,
    so that no code can take it for a value. The first backward still reduces to all ranks, because the layout changes
    after it, to the order of its gradients. (With ``auto`` the first few do, until sizes are chosen.) The layout is
    final from then on: optimizer state is sharded along it.

    One message a backward, behind the last bucket, carries the flags of all buckets: the parameters that some rank
    used, and whether some rank was asked to stop. A reduce-scatter would give the sum of a bucket's flags to one rank.
    """

    gathers_sparse = False  # the layout, along which optimizer state is sharded, contains all parameters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settled = False  # whether the layout is final
        self.on_gradient: Callable[[Parameter], None] | None = None  # called before each parameter gets its gradient
        super().__init__(*args, **kwargs)
        self.shards = GradientShards(self._layout, self._comm)
        self._kept = KeptAverages(self.shards, self._names)

    def track(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[Parameter]:
        new = super().track(named_parameters)
        for param in new:
            self._hooks.keep(param.register_hook(partial(self._before_gradient, param)))
        return new

    def _finish(self) -> None:
        super()._finish()
        self.settle()

    def settle(self) -> None:
        """Make the layout final, if it is not yet. Collective."""
        if not self.settled:
            self._revise_layout()
            self.settled = self._layout.settle()

    def _send(self, bucket: Bucket, name: str) -> Work:
        if not self.settled:
            return super()._send(bucket, name)
        ranks, comm, flat = self.active_ranks, self._comm, bucket.flat
        if self._compressor is not None and self._compressor.accepts(flat.dtype):
            return scatter_compressed_(bucket, self._compressor, comm, ranks, name)
        if ranks is None:
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        return ChainedWork(comm.reduce_scatter_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(ranks))

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        for param, produced in zip(bucket.params, bucket.produced, strict=True):
            if not produced:
                self._kept.before_sending(param, unreduced=param in self._unreduced)
        super()._launch()
        if self.settled and self._next == len(self._queue):
            self._works.append((bucket, self._send_flags()))

    def _send_flags(self) -> Work:
        flags = [part for bucket in self._queue for part in (bucket.wire.used, bucket.wire.stop)]
        targets = [part for bucket in self._queue for part in (bucket.used, bucket.stop)]
        device = self._queue[0].flat.device
        keeps, counted = len(self._kept) > 0, self._kept.count()
        vector = torch.cat([part.to(device, torch.float32) for part in (*flags, counted)])
        *parts, totals = vector.split([part.numel() for part in (*flags, counted)])

        def arrived() -> None:
            torch._foreach_copy_(targets, list(parts))
            if keeps or on_host(totals):  # reading it makes the host wait for a GPU
                self._kept.check_counts(self._comm.read(totals), self._comm.world_size)

        return ChainedWork(self._comm.all_reduce_(vector, name=self._named("flags")), arrived)

    def _before_gradient(self, param: Parameter, _: Tensor) -> None:
        """Called for each gradient of backward, and of `torch.autograd.grad`."""
        if self._passes.discards:
            return
        if self.on_gradient is not None:
            self.on_gradient(param)
        self._kept.before_gradient(param)

    def _take_gradient(self, param: Parameter) -> None:
        if not self._passes.discards:
            self._kept.after_gradient(param, reduced=self._passes.reduces and self._passes.enabled)
        super()._take_gradient(param)

    def _abandon(self) -> None:
        self._kept.abandon()
        super()._abandon()

    def _complete_averages(self) -> None:
        self._kept.add_to_buckets(self.active_ranks or self._comm.world_size)

    def _publish(self, bucket: Bucket) -> None:
        if self.settled:
            self.shards.mark_other_shards(bucket)
        for param in bucket.publish(self._comm.read):
            self._kept.published(param, settled=self.settled)
