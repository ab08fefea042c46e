"""Gradients in flat buckets, and when the buckets travel."""

from lightning_ring.comm.cost import DEFAULT_CAP_MB, default_cap_mb
from lightning_ring.gradients.bucket import Bucket, plan_buckets
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.shard_reducer import ShardReducer
from lightning_ring.gradients.sizing.auto_buckets import AutoBuckets

__all__ = ["DEFAULT_CAP_MB", "AutoBuckets", "Bucket", "Reducer", "ShardReducer", "default_cap_mb", "plan_buckets"]
