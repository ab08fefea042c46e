"""Sharded optimizers: each rank steps its shard of the parameters and holds its shard of the
optimizer state.
"""

from lightning_ring.algorithms.sharded.algorithm import Sharded

__all__ = ["Sharded"]
