"""Python objects as tensors of bytes."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
from torch import Tensor

from lightning_ring.errors import CollectiveError


def pickled(obj: Any) -> Tensor:
    """``obj`` as uint8, or the error of pickling it, so that all ranks learn of it and none waits for ever."""
    try:
        message = pickle.dumps((True, obj))
    except Exception as error:
        message = pickle.dumps((False, f"{type(error).__name__}: {error}"))
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpickled(message: Tensor, src: int) -> Any:
    """
    Raises:
        CollectiveError: Rank ``src`` could not pickle its object.
    """
    good, obj = pickle.loads(ctypes.string_at(message.data_ptr(), message.numel()))
    if not good:
        raise CollectiveError(f"rank {src} tried to send an object that cannot be pickled: {obj}. Send plain values.")
    return obj
