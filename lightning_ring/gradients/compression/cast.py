"""Gradients that travel as another floating-point type: rounded on the way into the buffer, and
once more as an average.

bfloat16 has 8 bits of precision and the range of float32; float16 has 11 bits, and goes from 6e-8
to 65,504.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.gradients.compression.compressor import Compressor


class Cast(Compressor):
    """Gradients in another dtype.

    The average is rounded before it leaves its owner, which takes the rounded value too. Sums in
    between are float32 over MPI, Gloo and shared memory (rounded once more if several nodes hold
    several ranks each, between the two levels); NCCL may round each of them.
    """

    can_shard = True
    buffer_dtype: torch.dtype

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        """As of `Compressor`; float32 sums of `all_reduce`, in another order, may round to
        another last bit.
        """
        return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)


class FP32(Cast):
    """``compression="fp32"``: twice the bytes of bfloat16 or float16 gradients, and one rounding,
    of their average.

    For models whose parameters are 16-bit (``precision="bf16-true"``), over NCCL, which sums 16-bit
    values in 16 bits: each addition rounds. MPI, Gloo and shared memory add them in float32 in any
    case. FSDP calls it ``reduce_dtype``. Gradients in float32 and float64 travel as they are.
    """

    name = "fp32"
    buffer_dtype = torch.float32

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def is_lossy(self) -> bool:
        return False


class BF16(Cast):
    """``compression="bf16"``: half the bytes; relative error of a rounding 2⁻⁹ at most; nothing
    overflows.
    """

    name = "bf16"
    buffer_dtype = torch.bfloat16


class FP16(Cast):
    """``compression="fp16"``: half the bytes; relative error of a rounding 2⁻¹² at most, for values
    that float16 can hold.

    A larger one becomes inf on every rank, as a gradient in float16 would: a loss scaler sees it,
    skips the step on all ranks and scales less. Without one use bfloat16. A value smaller than 6e-8
    becomes 0.
    """

    name = "fp16"
    buffer_dtype = torch.float16
