"""Synchronous data-parallel training for PyTorch Lightning over a ring all-reduce.

Importing it registers ``Trainer(strategy="ring")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ring.errors import RingError
from lightning_ring.foreign import register_with_foreign_registry
from lightning_ring.strategy import RingStrategy

__version__ = "0.1.0"
__all__ = ["RingError", "RingStrategy"]

if "ring" not in StrategyRegistry:
    StrategyRegistry.register("ring", RingStrategy, description="ring all-reduce: see lightning_ring.RingStrategy")
register_with_foreign_registry()
