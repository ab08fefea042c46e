"""Tensors whose memory cannot be read: an error instead of values that are old, or that only
other ranks have.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unreadable_like(tensor: Tensor, message: str) -> Tensor:
    """A tensor with the shape, strides, dtype and device of ``tensor`` that has no readable values.

    Access to its memory raises a `RuntimeError` with ``message``: in operators (from Python or not,
    in any thread), NumPy and C++. Its views are unreadable too. It takes no memory.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes()
    )
    unreadable = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    unreadable.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    make_unreadable(unreadable, message)
    return unreadable


def make_unreadable(tensor: Tensor, message: str) -> None:
    """From now on access to the memory of ``tensor`` raises a `RuntimeError` with ``message``."""
    torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, message)
