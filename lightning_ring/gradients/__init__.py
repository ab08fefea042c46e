"""Gradients in flat buckets, and when the buckets travel."""
