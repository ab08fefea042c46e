"""Algorithms whose ranks take several steps of their own between two exchanges."""

from lightning_ring.algorithms.local.diloco import DiLoCo
from lightning_ring.algorithms.local.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
