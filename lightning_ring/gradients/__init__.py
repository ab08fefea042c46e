"""Gradients in flat buckets, and when the buckets travel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ring.comm.cost import DEFAULT_CAP_MB, default_cap_mb

if TYPE_CHECKING:
    from lightning_ring.gradients.bucket import Bucket, plan_buckets
    from lightning_ring.gradients.reducer import Reducer
    from lightning_ring.gradients.shard_reducer import ShardReducer
    from lightning_ring.gradients.sizing.auto_buckets import AutoBuckets

_MODULES = {
    "AutoBuckets": "sizing.auto_buckets",
    "Bucket": "bucket",
    "Reducer": "reducer",
    "ShardReducer": "shard_reducer",
    "plan_buckets": "bucket",
}

__all__ = ["DEFAULT_CAP_MB", "AutoBuckets", "Bucket", "Reducer", "ShardReducer", "default_cap_mb", "plan_buckets"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the list of compressors below needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
