"""Whether some rank was asked to stop, as the buckets of a backward brought it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class Flag(NamedTuple):
    """A number that the host has, or on CUDA will have once ``copied`` is over."""

    value: Tensor
    copied: torch.cuda.Event | None


class StopFlag:
    """Kept on the host until it is asked for; on CUDA until the backward after its own has left a flag as well.

    To know of the last one the host would wait for the device, which would then wait for what the host sends it next.
    A rank that was asked to stop sets every flag from then on, so that none is missed.
    """

    def __init__(self) -> None:
        self._flags: deque[Flag] = deque(maxlen=2)

    def keep(self, flag: Tensor) -> None:
        """Copy ``flag``, of one element, which the next backward overwrites."""
        self._flags.append(_on_its_way(flag))

    def take(self) -> bool:
        """Whether it was set; False once it was taken."""
        agreed = False
        while self._flags and (self._flags[-1].copied is None or len(self._flags) > 1):
            flag = self._flags.popleft()
            if flag.copied is not None:
                flag.copied.synchronize()
            agreed = agreed or bool(flag.value.item() > 0)
        return agreed


def _on_its_way(flag: Tensor) -> Flag:
    if not flag.is_cuda:
        return Flag(flag.clone(), None)
    value, copied = flag.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()
    return Flag(value, copied)
