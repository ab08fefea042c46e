"""Errors of the Horovod API."""

from __future__ import annotations

from lightning_ring.errors import RingError


class HorovodInternalError(RingError):
    """A collective failed, on every rank: tensors that do not fit together, or a rank that is gone."""
