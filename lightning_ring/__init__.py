"""Synchronous data-parallel training for PyTorch Lightning over a ring all-reduce.

Importing it registers ``Trainer(strategy="ring")``.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ring.errors import RingError

if TYPE_CHECKING:
    from lightning_ring.strategy import RingStrategy

__version__ = "0.1.0"
__all__ = ["RingError", "RingStrategy"]


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_ring.foreign import register_with_foreign_registry
    from lightning_ring.strategy import RingStrategy

    if "ring" not in StrategyRegistry:
        StrategyRegistry.register("ring", RingStrategy, description="ring all-reduce: see lightning_ring.RingStrategy")
    register_with_foreign_registry()


def __getattr__(name: str) -> Any:
    if name == "RingStrategy":
        from lightning_ring.strategy import RingStrategy

        return RingStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if Path(sys.argv[0]).name != "ringrun":  # it starts other processes: importing torch would be most of its running time
    _register()
