"""Averages gradients so that each rank has its shard: the first half of an all-reduce, for a
sharded optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import ChainedWork, ReduceOp, Work
from lightning_ring.comm.host_copy import on_host
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sending import scatter_compressed_
from lightning_ring.gradients.sharded_gradient import ShardedGradient
from lightning_ring.gradients.shards import GradientShards


class ShardReducer(Reducer):
    """A `Reducer` that scatters: ``param.grad`` becomes a `ShardedGradient`, of which this rank has
    a part.

    The part lies in the shard of a bucket that is `shard_bounds` of ``bucket.flat`` for
    ``comm.shard_index``. After the first backward all ranks get whole averages, because the layout
    changes then, to the order of its gradients. (With ``auto`` the first few leave whole averages,
    until sizes are chosen.) The layout is final from then on: optimizer state is sharded along it.

    An average that is still in ``param.grad`` at the next backward stays apart from its gradients,
    and is added to their average.

    One message a backward, behind the last bucket, carries the flags of all buckets: the parameters
    that some rank used, and whether some rank was asked to stop. A reduce-scatter would give the
    sum of a bucket's flags to one rank.
    """

    # the layout, along which optimizer state is sharded, contains all parameters
    gathers_sparse = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settled = False  # whether the layout is final
        # called with each parameter that got a gradient
        self.on_gradient: Callable[[Parameter], None] | None = None
        # parameters with an average from before the layout was final
        self._whole: set[Parameter] = set()
        self._kept: dict[Parameter, ShardedGradient] = {}  # averages from before this backward
        self._flags: list[Tensor] = []  # of the buckets that this backward has sent
        super().__init__(*args, **kwargs)
        self.shards = GradientShards(self.layout, self._comm)

    def _finish(self) -> None:
        super()._finish()
        self._kept.clear()
        self.settle()

    def settle(self) -> None:
        """Make the layout final, if it is not yet. Collective."""
        if self.settled:
            return
        self._revise_layout()
        self.settled = self.layout.settle()
        if self.settled:
            for bucket in self.buckets:
                whole = [
                    param
                    for param in bucket.params
                    if param in self._whole and param.grad is not None
                ]
                values = [
                    own for param in whole if (own := self.shards.of_gradient(param)) is not None
                ]
                if values:
                    torch._foreach_copy_(self._show(bucket, whole), values)
            self._whole.clear()

    def _begin(self) -> None:
        super()._begin()
        self._kept.clear()  # of a backward that raised
        self._flags.clear()

    def _send(self, bucket: Bucket, name: str) -> Work:
        self._flags += [
            flags.to(torch.float32, copy=True) for flags in (bucket.wire.used, bucket.wire.stop)
        ]
        ranks, comm, flat = self.active_ranks, self._comm, bucket.flat
        if self._compressor is not None and self._compressor.accepts(flat.dtype):
            return scatter_compressed_(bucket, self._compressor, comm, ranks, name)
        if ranks is None:
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        return ChainedWork(
            comm.reduce_scatter_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(ranks)
        )

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        for param in bucket.params:
            if isinstance(grad := param.grad, ShardedGradient):
                local = grad.set_aside(self.shards.part(param) if self.settled else None)
                self._kept[param], param.grad = grad, local
                del grad, local  # `Bucket.fill` counts references
        super()._launch()
        if self._next == len(self._queue):
            self._works.append((bucket, self._send_flags()))

    def _send_flags(self) -> Work:
        flags, self._flags = self._flags, []
        targets = [part for bucket in self._queue for part in (bucket.used, bucket.stop)]
        device = self._queue[0].flat.device
        # small: sums over many ranks are exact in float32
        keeps, digit = len(self._kept) > 0, len(self._kept) % 16
        counted = torch.tensor([keeps, digit, digit * digit], dtype=torch.float32)
        vector = torch.cat([part.to(device) for part in (*flags, counted)])
        *parts, totals = vector.split([part.numel() for part in (*flags, counted)])

        def arrived() -> None:
            torch._foreach_copy_(targets, list(parts))
            if keeps or on_host(totals):  # reading it makes the host wait for a GPU
                self._check_kept(self._comm.read(totals))

        return ChainedWork(self._comm.all_reduce_(vector, name=self._named("flags")), arrived)

    def _check_kept(self, totals: Tensor) -> None:
        """Raise `RingError` if ``totals`` shows that ranks keep different numbers of averages.

        They are sums over ranks: of whether a rank keeps any, of the last digit of their number,
        and of its square.
        """
        world_size = self._comm.world_size
        keeping, total, squares = totals.tolist()
        # digits are equal iff these are
        if keeping not in (0, world_size) or total * total != squares * world_size:
            raise RingError(
                f"{keeping:g} of {world_size} ranks keep averages of an earlier backward, or "
                "different numbers of them: some ranks have dropped theirs (zero_grad). Under "
                "strategy='ring_sharded' each rank has only its shard of an average, so that the "
                "sum with this backward is unknown. Drop gradients on all ranks, or on none."
            )

    def _take_gradient(self, param: Parameter) -> None:
        if self.on_gradient is not None and not self._passes.discards:
            self.on_gradient(param)
        super()._take_gradient(param)

    def _abandon(self) -> None:
        for bucket in self.buckets:
            for param, produced, contributed in zip(
                bucket.params, bucket.produced, bucket.contributed, strict=True
            ):
                kept = self._kept.pop(param, None)
                if bucket.launched and kept is not None and not contributed:
                    param.grad = kept  # an average that this backward leaves alone
                elif produced and isinstance(param.grad, ShardedGradient):
                    param.grad = None
        super()._abandon()

    def _complete_averages(self) -> None:
        if not self.settled:  # by the same two steps that parameters take, for the same bits
            for work in [
                self._comm.all_gather_(bucket.flat, name=self._named("averages"))
                for bucket in self._queue
            ]:
                work.wait()

    def _publish(self, bucket: Bucket) -> None:
        if not self.settled:
            self._whole.update(bucket.publish(self._comm.read))
            return
        used = bucket.withdraw(self._comm.read)
        kept = [param for param in bucket.params if param in self._kept]
        before = [self._kept[param].contents.average for param in kept]
        self._show(
            bucket, [param for param in bucket.params if param in used or param in self._kept]
        )
        if kept:
            torch._foreach_add_([self._kept[param].contents.average for param in kept], before)

    def _show(self, bucket: Bucket, params: Sequence[Parameter]) -> list[Tensor]:
        """Set ``.grad`` of ``params`` to this rank's parts of the averages in ``bucket``, and
        return these.
        """
        averages = self.shards.averages(bucket)
        for param in params:
            if (kept := self._kept.get(param)) is not None:  # other code may hold it
                kept.contents.average, param.grad = averages[param], kept
            else:
                param.grad = ShardedGradient.of(self.shards.part(param), averages[param])
        return [averages[param] for param in params]
