"""Retrieval by embeddings: nearest neighbours over the ranks, hit rates R@K and MAP@R, re-ranking."""

from lightning_ring.retrieval.metrics import NothingToFindError, RetrievalMetrics, retrieval_metrics
from lightning_ring.retrieval.neighbours import AllGather, gather_rows, nearest, search
from lightning_ring.retrieval.rerank import rerank

__all__ = [
    "AllGather",
    "NothingToFindError",
    "RetrievalMetrics",
    "gather_rows",
    "nearest",
    "rerank",
    "retrieval_metrics",
    "search",
]
