"""Gradients that travel as bfloat16: 8 bits of precision, and the range of float32."""

from __future__ import annotations

import torch

from lightning_ring.gradients.compression.sixteen_bit import SixteenBit


class BF16(SixteenBit):
    """``compression="bf16"``: relative error of a rounding 2⁻⁹ at most; nothing overflows."""

    def __init__(self) -> None:
        super().__init__("bf16", torch.bfloat16)
