"""`Compression`: the format in which a tensor travels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WireFormat:
    """Converts a tensor before it is sent, and back. ``name`` is a compressor of `RingStrategy`."""

    name: str | None = None

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class _Half(WireFormat):
    name = "fp16"
    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class _Brain(_Half):
    name = "bf16"
    dtype = torch.bfloat16


class Compression:
    """``none``, ``fp16``, and ``bf16``, which keeps float32's range."""

    none = WireFormat
    fp16 = _Half
    bf16 = _Brain
