"""Algorithms whose ranks step with gradients of their own, and average parameters."""

from lightning_ring.algorithms.local.diloco import DiLoCo
from lightning_ring.algorithms.local.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
