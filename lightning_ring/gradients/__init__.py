"""Gradients in flat buckets, and when the buckets travel."""

from lightning_ring.gradients.bucket import Bucket, plan_buckets
from lightning_ring.gradients.reducer import Reducer

__all__ = ["Bucket", "Reducer", "plan_buckets"]
