"""float32 gradients that travel as a 16-bit type: rounded on the way into the buffer, and once more as an average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work, shard
from lightning_ring.gradients.compression.compressor import Compressor


class SixteenBit(Compressor):
    """Half the bytes; each value is rounded to nearest.

    The average is rounded before it leaves its owner, which takes the rounded value too. Sums in between are float32
    over MPI, Gloo and shared memory (rounded once more where several nodes hold several ranks each, between the two
    levels); NCCL may round each of them.
    """

    can_shard = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.buffer_dtype: torch.dtype = dtype

    def wire_bytes(self, numel: int, world_size: int) -> float | None:
        return numel * self.buffer_dtype.itemsize

    def all_reduce(self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = "") -> Work:
        work = comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
        return ChainedWork(work, lambda: self.inspect(flat, name)) if comm.rank == 0 else work

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        work = comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        own = shard(flat, comm.world_size, comm.shard_index)
        return ChainedWork(work, lambda: self.inspect(own, name))  # no other rank sees this shard

    def inspect(self, average: Tensor, name: str) -> None:
        """``average`` has arrived. Called on one rank for each part of it."""
