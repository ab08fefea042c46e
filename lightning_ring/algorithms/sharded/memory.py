"""Memory of parameters: whether others hold it too, and tensors whose memory cannot be read."""

from __future__ import annotations

import torch
from torch import Tensor


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor, an array or another process may see the memory of ``tensor``.

    Such as ``alias = param.data``, ``param.data = other``, ``torch.from_numpy(array)`` and ``param.share_memory_()``.
    """
    storage = tensor.untyped_storage()
    alone = torch.empty(1, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    return not storage.resizable() or num_holders(storage) > 1 + num_holders(alone)  # the tensor holds it too


def num_holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def unreadable_like(tensor: Tensor, message: str) -> Tensor:
    """A tensor with the shape, strides, dtype and device of ``tensor``, whose values nothing can read.

    Whatever asks for its memory gets a `RuntimeError` with ``message``: an operator, called from Python or not, in any
    thread; NumPy; C++. Views can be made of it, and are as unreadable. It takes no memory.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    unreadable = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    unreadable.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)
    return unreadable
