"""Parameters whose memory is shared with other objects, and tensors whose memory cannot be read."""

from __future__ import annotations

import torch
from torch import Tensor


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor, array or process shares the memory of ``tensor``.

    Examples: ``alias = param.data``, ``param.data = other``, ``torch.from_numpy(array)``, ``param.share_memory_()``.
    """
    storage = tensor.untyped_storage()
    alone = torch.empty(1, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    return not storage.resizable() or num_holders(storage) > 1 + num_holders(alone)  # the tensor holds it too


def num_holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def unreadable_like(tensor: Tensor, message: str) -> Tensor:
    """A tensor with the shape, strides, dtype and device of ``tensor`` that has no readable values.

    Access to its memory raises a `RuntimeError` with ``message``: in operators (from Python or not, in any thread),
    NumPy and C++. Its views are unreadable too. It takes no memory.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    unreadable = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    unreadable.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)
    return unreadable
