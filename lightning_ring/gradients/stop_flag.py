"""The stop flag that a backward's buckets carry: whether some rank was asked to stop."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class Flag(NamedTuple):
    """A flag on the host; on CUDA it is valid after ``copied``."""

    value: Tensor
    copied: torch.cuda.Event | None


class StopFlag:
    """The flags of the last backward passes. On CUDA the flag of the last pass is not read before the next pass.

    Reading it earlier would make the host wait for the device, and the device then for the host's next kernel. A rank
    that was asked to stop sets every flag from then on, so that no request is missed.
    """

    def __init__(self) -> None:
        self._flags: deque[Flag] = deque(maxlen=2)

    def keep(self, flag: Tensor) -> None:
        """Copy ``flag`` (one element), which the next backward overwrites."""
        self._flags.append(_copied_to_host(flag))

    def take(self) -> bool:
        """Whether a flag was set. Each flag is read once."""
        agreed = False
        while self._flags and (self._flags[-1].copied is None or len(self._flags) > 1):
            flag = self._flags.popleft()
            if flag.copied is not None:
                flag.copied.synchronize()
            agreed = agreed or bool(flag.value.item() > 0)
        return agreed


def _copied_to_host(flag: Tensor) -> Flag:
    if not flag.is_cuda:
        return Flag(flag.clone(), None)
    value, copied = flag.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()
    return Flag(value, copied)
