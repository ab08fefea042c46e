"""Memory of batches that is filled again: to the kernel, fresh pages cost more than what is written into them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor


def lend(memory: Tensor, release: Callable[[], object]) -> Tensor:
    """A tensor over ``memory`` (contiguous, on the CPU); ``release`` is called when all that shares it is gone.

    That is the tensor, views of it, and arrays made of them, wherever they are held; in the thread that lets go last.
    """
    with torch.inference_mode(False):
        array = memory.view(torch.uint8).numpy()  # numpy knows no bfloat16
        lent = torch.from_numpy(array).view(memory.dtype)
    weakref.finalize(array, release).atexit = False
    return lent
