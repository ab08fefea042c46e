"""float32 gradients that travel as a 16-bit type: rounded on the way into the bucket, and once more as an average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work, shard
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression.compressor import Compressor
from lightning_ring.gradients.sending import FollowedWork


class SixteenBit(Compressor):
    """Half the bytes; each value is rounded to nearest.

    Gradients are converted while they are copied into the bucket. Their average is rounded before it leaves its owner,
    who takes the rounded value too. Whether sums in between are rounded is the communicator's matter: over MPI and Gloo
    they are not, in shared memory and NCCL they may be.
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
        return FollowedWork(work, lambda: self._arrived(bucket.flat, bucket.wire.flat, comm.world_size / divisor, name))

    def reduce_scatter(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        work = comm.reduce_scatter_(bucket.wire.flat, op=ReduceOp.AVG, name=name)
        own, sent = (shard(flat, comm.world_size, comm.shard_index) for flat in (bucket.flat, bucket.wire.flat))
        return FollowedWork(work, lambda: self._arrived(own, sent, comm.world_size / divisor, name))

    def _arrived(self, flat: Tensor, sent: Tensor, factor: float, name: str) -> None:
        # averaged over all ranks and multiplied here, because a sum in 16 bits overflows where the average would not
        flat.copy_(sent)
        if factor != 1:
            flat.mul_(factor)
