"""The errors that lightning_ring raises. Each message says what was found, what was expected and
what to do.
"""

from __future__ import annotations

__all__ = [
    "CollectiveError",
    "ConfigurationError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ModelMismatchError",
    "PeerFailedError",
    "RankDiscoveryError",
    "RingError",
    "SampleError",
    "ShardError",
    "ShardLostError",
    "StateLostError",
    "UnevenBatchesError",
]


class RingError(RuntimeError):
    """Base class of the errors of lightning_ring."""


class ConfigurationError(RingError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class RankDiscoveryError(RingError):
    """The ranks that the launcher started do not match the ranks that were requested or found."""


class ModelMismatchError(RingError):
    """Ranks have models of different shapes, dtypes or numbers of parameters."""


class UnevenBatchesError(RingError):
    """Ranks have different numbers of training batches."""


class CollectiveError(RingError):
    """A collective did not finish before the timeout, or ranks called it with different tensors."""


class PeerFailedError(RingError):
    """Another rank raised, was killed or left the job; the message names it and, where known,
    its error.
    """


class StateLostError(RingError):
    """Every rank that held the training's state, or a part of it, has died."""


class ShardError(RingError):
    """Packed shards are missing, cut short or changed; the message names the file and, where
    known, the offset.
    """


class ShardLostError(ShardError):
    """A shard is missing, cut short or cannot be read at all, and with it many images; the
    message names the file.
    """


class SampleError(RingError):
    """A sample cannot be read or decoded, or its data set raised; the message names it."""


class HorovodInternalError(RingError):
    """A collective failed, on every rank: tensors that do not fit together, or a rank that is
    gone.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks wait to take part. ``skip_sync``: those that are left hold the same state already."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(f"other ranks take part from here on (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


def check_arguments(name: str, works: bool, expected: str, **given: object) -> None:
    """Raise `ConfigurationError` unless the arguments ``given`` to ``name`` work together."""
    if not works:
        found = ", ".join(f"{argument}={value!r}" for argument, value in given.items())
        raise ConfigurationError(f"{name} got {found}; expected {expected}.")
