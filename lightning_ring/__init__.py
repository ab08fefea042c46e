"""Synchronous data-parallel training for PyTorch Lightning over a ring all-reduce.

Importing it registers ``strategy="ring"``, ``"ring_sharded"`` and ``"ring_local"`` with the Trainer
and with Fabric, and ``"ring_elastic"`` with the Trainer. `distribute` serves plain PyTorch loops.
"""

from typing import TYPE_CHECKING, Any

from lightning_ring.errors import RingError
from lightning_ring.host import require_posix
from lightning_ring.integrations.registration import register_strategies

if TYPE_CHECKING:
    from lightning_ring.integrations.fabric import RingFabricStrategy
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy
    from lightning_ring.integrations.lightning.strategy import RingStrategy
    from lightning_ring.loops.distribute import distribute

__version__ = "0.1.0"
__all__ = ["ElasticStrategy", "RingError", "RingFabricStrategy", "RingStrategy", "distribute"]

register_strategies()


def __getattr__(name: str) -> Any:
    if name in __all__:
        require_posix(f"lightning_ring.{name}")
    if name == "RingStrategy":
        from lightning_ring.integrations.lightning.strategy import RingStrategy

        return RingStrategy
    if name == "ElasticStrategy":
        from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

        return ElasticStrategy
    if name == "RingFabricStrategy":
        from lightning_ring.integrations.fabric import RingFabricStrategy

        return RingFabricStrategy
    if name == "distribute":
        from lightning_ring.loops.distribute import distribute

        return distribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
