"""Retrieval by embeddings: nearest neighbours over the ranks, hit rates R@K and MAP@R."""

from lightning_ring.retrieval.metrics import NothingToFindError, RetrievalMetrics, retrieval_metrics
from lightning_ring.retrieval.neighbours import AllGather, gather_rows, nearest, search

__all__ = [
    "AllGather",
    "NothingToFindError",
    "RetrievalMetrics",
    "gather_rows",
    "nearest",
    "retrieval_metrics",
    "search",
]
