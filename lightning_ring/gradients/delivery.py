"""How buckets travel, and what ``param.grad`` becomes: the whole average, or this rank's part of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import (
    ChainedWork,
    Communicator,
    ReduceOp,
    Work,
    advance,
    shard,
)
from lightning_ring.comm.host_copy import on_host
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression.compressor import Compressor, bounds_of
from lightning_ring.gradients.sharded_gradient import GradientShards, ShardedGradient
from lightning_ring.host.accelerator import send

Named = Callable[[str], str]  # the name of a collective of this backward, from what it carries


class Delivery(Protocol):
    """What a `Reducer` does with buckets that are filled, and with averages that have arrived."""

    def set_aside(self, bucket: Bucket) -> None:
        """``bucket`` is about to be filled."""

    def send(
        self, number: int, queue: Sequence[Bucket], active_ranks: int | None, named: Named
    ) -> list[Work]:
        """Start to average the bucket ``number`` of this backward's ``queue``."""

    def publish(self, queue: Sequence[Bucket], named: Named) -> None:
        """Every bucket has arrived: set ``.grad`` of the parameters in it."""

    def abandon(self, buckets: Sequence[Bucket]) -> None:
        """The backward has raised. It may neither send nor wait."""

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """The layout of ``buckets`` is final from now on."""


class WholeAverages:
    """An all-reduce of each bucket: every rank gets the whole averages."""

    def __init__(self, comm: Communicator, compressor: Compressor | None) -> None:
        self._comm, self._compressor = comm, compressor

    def set_aside(self, bucket: Bucket) -> None: ...

    def send(
        self, number: int, queue: Sequence[Bucket], active_ranks: int | None, named: Named
    ) -> list[Work]:
        bucket, compressor = queue[number], self._compressor
        name = named(f"bucket {number} ({bucket.describe()})")
        if compressor is None or not compressor.accepts(bucket.flat.dtype):
            return [average_(bucket.flat, self._comm, active_ranks, name)]
        return [average_compressed_(bucket, compressor, self._comm, active_ranks, name)]

    def publish(self, queue: Sequence[Bucket], named: Named) -> None:
        for bucket in queue:
            bucket.publish(self._comm.read)

    def abandon(self, buckets: Sequence[Bucket]) -> None: ...

    def settle(self, buckets: Sequence[Bucket]) -> None: ...


class ShardedAverages:
    """A reduce-scatter of each bucket: ``param.grad`` becomes a `ShardedGradient`, of which this
    rank has a part.

    The part lies in the shard of a bucket that is `shard_bounds` of ``bucket.flat`` for
    ``comm.shard_index``. Until the layout is final (`settle`) all ranks get whole averages, because
    the layout changes after the first backward, to the order of its gradients. Optimizer state is
    sharded along the final layout.

    An average that is still in ``param.grad`` at the next backward stays apart from its gradients,
    and is added to their average.

    One message a backward, after the last bucket, carries the flags of all buckets: the parameters
    that some rank used, and whether some rank was asked to stop. A reduce-scatter would give the
    sum of a bucket's flags to one rank.
    """

    def __init__(
        self, comm: Communicator, compressor: Compressor | None, shards: GradientShards
    ) -> None:
        self._comm, self._compressor, self._shards = comm, compressor, shards
        self._settled = False
        # parameters with an average from before the layout was final
        self._whole: set[Parameter] = set()
        self._kept: dict[Parameter, ShardedGradient] = {}  # averages from before this backward
        self._flags: list[Tensor] = []  # of the buckets that this backward has sent

    def set_aside(self, bucket: Bucket) -> None:
        for param in bucket.params:
            if isinstance(grad := param.grad, ShardedGradient):
                local = grad.set_aside(self._shards.part(param) if self._settled else None)
                self._kept[param], param.grad = grad, local

    def send(
        self, number: int, queue: Sequence[Bucket], active_ranks: int | None, named: Named
    ) -> list[Work]:
        bucket = queue[number]
        name = named(f"bucket {number} ({bucket.describe()})")
        flags = (bucket.wire.used, bucket.wire.stop)
        self._flags += [part.to(torch.float32, copy=True) for part in flags]
        works = [self._scatter(bucket, active_ranks, name)]
        if number == len(queue) - 1:
            works.append(self._send_flags(queue, named("flags")))
        return works

    def _scatter(self, bucket: Bucket, active_ranks: int | None, name: str) -> Work:
        comm, compressor, flat = self._comm, self._compressor, bucket.flat
        if compressor is not None and compressor.accepts(flat.dtype):
            return scatter_compressed_(bucket, compressor, comm, active_ranks, name)
        if active_ranks is None:
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        total = comm.reduce_scatter_(flat, op=ReduceOp.SUM, name=name)
        return ChainedWork(total, lambda: flat.div_(active_ranks))

    def _send_flags(self, queue: Sequence[Bucket], name: str) -> Work:
        flags, self._flags = self._flags, []
        targets = [part for bucket in queue for part in (bucket.used, bucket.stop)]
        device = queue[0].flat.device
        # small: sums over many ranks are exact in float32
        keeps, digit = len(self._kept) > 0, len(self._kept) % 16
        if keeps:
            counted = send(torch.tensor([1.0, digit, digit * digit]), device)
        else:  # made there: a backward without averages to keep sends the GPU nothing
            counted = torch.zeros(3, device=device)
        vector = torch.cat([part.to(device) for part in (*flags, counted)])
        *parts, totals = vector.split([part.numel() for part in (*flags, counted)])

        def arrived() -> None:
            torch._foreach_copy_(targets, list(parts))
            if keeps or on_host(totals):  # reading it makes the host wait for a GPU
                self._check_kept(self._comm.read(totals))

        return ChainedWork(self._comm.all_reduce_(vector, name=name), arrived)

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

    def publish(self, queue: Sequence[Bucket], named: Named) -> None:
        if self._settled:
            for bucket in queue:
                self._publish_parts(bucket)
        else:  # by the same two steps that parameters take, for the same bits
            name = named("averages")
            for work in [self._comm.all_gather_(bucket.flat, name=name) for bucket in queue]:
                work.wait()
            for bucket in queue:
                self._whole.update(bucket.publish(self._comm.read))
        self._kept.clear()

    def _publish_parts(self, bucket: Bucket) -> None:
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
        averages = self._shards.averages(bucket)
        for param in params:
            if (kept := self._kept.get(param)) is not None:  # other code may hold it
                kept.contents.average, param.grad = averages[param], kept
            else:
                param.grad = ShardedGradient.of(self._shards.part(param), averages[param])
        return [averages[param] for param in params]

    def abandon(self, buckets: Sequence[Bucket]) -> None:
        self._flags.clear()
        for bucket in buckets:
            for param, produced, contributed in zip(
                bucket.params, bucket.produced, bucket.contributed, strict=True
            ):
                kept = self._kept.pop(param, None)
                if bucket.launched and kept is not None and not contributed:
                    param.grad = kept  # an average that this backward leaves alone
                elif produced and isinstance(param.grad, ShardedGradient):
                    param.grad = None

    def settle(self, buckets: Sequence[Bucket]) -> None:
        self._settled = True
        for bucket in buckets:
            whole = [p for p in bucket.params if p in self._whole and p.grad is not None]
            values = [own for p in whole if (own := self._shards.of_gradient(p)) is not None]
            if values:
                torch._foreach_copy_(self._show(bucket, whole), values)
        self._whole.clear()


def average_(flat: Tensor, comm: Communicator, active_ranks: int | None, name: str) -> Work:
    """Start to average ``flat`` in place over all ranks; or its sum is divided by
    ``active_ranks`` of them.
    """
    if active_ranks is None:
        return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
    return ChainedWork(
        comm.all_reduce_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(active_ranks)
    )


def prepare_compressed(bucket: Bucket, compressor: Compressor) -> None:
    """``bucket``, or its memory, is new."""
    if compressor.buffer_dtype is not None:
        bucket.travel_as(compressor.buffer_dtype)
    else:
        compressor.prepare(bucket.gradients, bucket)


def average_compressed_(
    bucket: Bucket, compressor: Compressor, comm: Communicator, active_ranks: int | None, name: str
) -> Work:
    """As `average_`, through ``compressor``. The bucket's flags arrive exactly: positive where
    any rank had a 1.
    """
    # a conversion keeps 0 and 1: they travel in the same buffer
    if compressor.buffer_dtype is not None:
        work = compressor.all_reduce(bucket.wire.flat, comm, name=name)
        return _converted_back(work, bucket.flat, bucket.wire.flat, comm, active_ranks)
    flags = comm.all_reduce_(bucket.flags, name=f"{name}, flags")
    work = compressor.all_reduce(bucket.gradients, comm, name=name)
    return ChainedWork(
        _BehindFlags(flags, work), lambda: _rescale_(bucket.gradients, comm, active_ranks)
    )


class _BehindFlags:
    """``work``, which may read flags when it ends."""

    __slots__ = ("_flags", "_work")

    def __init__(self, flags: Work, work: Work) -> None:
        self._flags, self._work = flags, work

    def advance(self) -> None:
        advance(self._work)

    def wait(self) -> None:
        self._flags.wait()
        self._work.wait()

    def done(self) -> bool:
        return self._flags.done() and self._work.done()


def scatter_compressed_(
    bucket: Bucket, compressor: Compressor, comm: Communicator, active_ranks: int | None, name: str
) -> Work:
    """The same, for this rank's shard of ``bucket.flat``; the rest of it, flags included, is
    scratch.
    """
    sent = bucket.wire.flat
    if compressor.buffer_dtype is None:
        torch._foreach_zero_(_between_gradients(bucket))  # it would spoil a block's scale
    work = compressor.reduce_scatter(sent, comm, name=name)
    own, own_sent = (shard(flat, comm.world_size, comm.shard_index) for flat in (bucket.flat, sent))
    return _converted_back(work, own, own_sent, comm, active_ranks)


def _between_gradients(bucket: Bucket) -> list[Tensor]:
    """What else lies in ``bucket.flat``: padding, and the flags."""
    bounds = bounds_of(bucket.flat, bucket)
    starts, ends = (
        [*(start for start, _ in bounds), bucket.flat.numel()],
        [0, *(end for _, end in bounds)],
    )
    return [bucket.flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


def _converted_back(
    work: Work, flat: Tensor, sent: Tensor, comm: Communicator, active_ranks: int | None
) -> Work:
    # the division comes after: a sum in 16 bits overflows where the average would not
    return ChainedWork(work, lambda: flat.copy_(sent), lambda: _rescale_(flat, comm, active_ranks))


def _rescale_(average: Tensor, comm: Communicator, active_ranks: int | None) -> None:
    """From a mean over all ranks to one over ``active_ranks`` of them."""
    if active_ranks not in (None, comm.world_size):
        average.mul_(comm.world_size / active_ranks)
