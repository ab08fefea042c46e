"""The errors that lightning_ring raises. Each message says what was found, what was expected and what to do."""

from __future__ import annotations


class RingError(RuntimeError):
    """Base of every error that lightning_ring raises on purpose."""


class ConfigurationError(RingError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class RankDiscoveryError(RingError):
    """What the launcher started and what was asked for, or found, disagree."""


class ModelMismatchError(RingError):
    """Ranks hold models of different shape, dtype or parameter count."""


class UnevenBatchesError(RingError):
    """Ranks have different numbers of training batches."""


class CollectiveError(RingError):
    """A collective did not finish: it was late beyond the timeout, or the ranks called it with different tensors."""


class PeerFailedError(RingError):
    """Another rank raised, was killed or left the job; the message names it and, where known, its error."""


class ShardError(RingError):
    """Packed shards are missing, cut short or changed; the message names the file and, where known, the offset."""
