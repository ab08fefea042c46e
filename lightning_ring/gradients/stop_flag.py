"""The stop flag that a backward's buckets carry: whether some rank was asked to stop."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.host_copy import HostCopy


class StopFlag:
    """The flags of the last backward passes. On a GPU the flag of the last pass is not read before
    the next pass.

    Reading it earlier would make the host wait for the device, and the device then for the host's
    next kernel. A rank that was asked to stop sets every flag from then on, so that no request is
    missed.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._flags: deque[HostCopy] = deque(maxlen=2)

    def keep(self, flag: Tensor) -> None:
        """Copy ``flag`` (one element), which the next backward overwrites."""
        self._flags.append(self._comm.copy_to_host(flag))

    def take(self) -> bool:
        """Whether a flag was set. Each flag is read once."""
        agreed = False
        while self._flags and (self._flags[-1].immediate or len(self._flags) > 1):
            agreed = bool(self._flags.popleft().value() > 0) or agreed
        return agreed
