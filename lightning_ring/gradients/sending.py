"""How the buffer of a bucket travels: as it is, or through a compressor."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import (
    ChainedWork,
    Communicator,
    ReduceOp,
    Work,
    advance,
    shard,
)
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression.compressor import Compressor, bounds_of


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
