"""float32 gradients that travel as a 16-bit type: rounded on the way into the bucket, and once more as an average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work, shard
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression.compressor import Compressor
from lightning_ring.gradients.sending import ChainedWork


class SixteenBit(Compressor):
    """Half the bytes; each value is rounded to nearest.

    Gradients are converted while they are copied into the bucket. Their average is rounded before it leaves its owner,
    who takes the rounded value too. Sums in between are float32 over MPI, Gloo and shared memory (rounded once more
    where several nodes hold several ranks each, between the two levels); NCCL may round each of them.
    """

    can_shard = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def wire_bytes(self, dtype: torch.dtype) -> int | None:
        return self.dtype.itemsize if self.accepts(dtype) else dtype.itemsize

    def prepare(self, bucket: Bucket) -> None:
        bucket.travel_as(self.dtype)

    def all_reduce(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        work = comm.all_reduce_(bucket.wire.flat, op=ReduceOp.AVG, name=name)
        return self._then_widen(work, bucket.flat, bucket.wire.flat, comm, divisor, name, reports=comm.rank == 0)

    def reduce_scatter(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        work = comm.reduce_scatter_(bucket.wire.flat, op=ReduceOp.AVG, name=name)
        own, sent = (shard(flat, comm.world_size, comm.shard_index) for flat in (bucket.flat, bucket.wire.flat))
        return self._then_widen(work, own, sent, comm, divisor, name, reports=True)  # nobody else sees this shard

    def _then_widen(
        self, work: Work, flat: Tensor, sent: Tensor, comm: Communicator, divisor: int, name: str, *, reports: bool
    ) -> Work:
        def widen() -> None:
            flat.copy_(sent)
            if divisor != comm.world_size:  # not before: a sum in 16 bits overflows where the average would not
                flat.mul_(comm.world_size / divisor)
            if reports:
                self.look_at(flat, name)

        return ChainedWork(work, widen)

    def look_at(self, average: Tensor, name: str) -> None:
        """``average`` has arrived. Called on one rank for each part of it."""
