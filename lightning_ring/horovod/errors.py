"""Errors of the Horovod API."""

from __future__ import annotations

from lightning_ring.errors import RingError


class HorovodInternalError(RingError):
    """A collective failed, on every rank: tensors that do not fit together, or a rank that is
    gone.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks wait to take part. ``skip_sync``: those that are left hold the same state already."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(f"other ranks take part from here on (skip_sync={skip_sync})")
        self.skip_sync = skip_sync
