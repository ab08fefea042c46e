"""Whether some rank was asked to stop, as the buckets of a backward brought it."""

from __future__ import annotations

import torch
from torch import Tensor


class StopFlag:
    """Kept on the host until it is asked for, a step later: then the host does not wait for the device."""

    def __init__(self) -> None:
        self._flag: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def keep(self, flag: Tensor) -> None:
        """Copy ``flag``, of one element, which the next backward overwrites."""
        if flag.is_cuda:
            self._flag = flag.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._flag = flag.clone()

    def take(self) -> bool:
        """Whether it was set; False once it was taken."""
        flag, self._flag = self._flag, None
        if flag is None:
            return False
        if self._copied is not None:
            self._copied.synchronize()
        return bool(flag.item() > 0)
