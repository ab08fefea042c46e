"""16-bit gradients that travel, and are summed, as float32."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.gradients.compression.compressor import Compressor


class FP32(Compressor):
    """``compression="fp32"``: twice the bytes of bfloat16 or float16 gradients, and one rounding,
    of their average.

    For models whose parameters are 16-bit (``precision="bf16-true"``), over NCCL, which sums 16-bit
    values in 16 bits: each addition rounds. MPI, Gloo and shared memory add them in float32 in any
    case. FSDP calls it ``reduce_dtype``. Gradients in float32 and float64 travel as they are.
    """

    name = "fp32"
    can_shard = True
    buffer_dtype = torch.float32

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def wire_bytes(self, numel: int, world_size: int) -> float | None:
        return 4 * numel

    def is_lossy(self) -> bool:
        return False

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        """As of `Compressor`; float32 sums of `all_reduce`, in another order, may round to
        another last bit.
        """
        return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
