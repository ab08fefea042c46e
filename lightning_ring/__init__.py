"""Synchronous data-parallel training for PyTorch Lightning over a ring all-reduce.

Importing it registers ``strategy="ring"``, ``"ring_sharded"`` and ``"ring_local"`` with the Trainer
and with Fabric, and ``"ring_elastic"`` with the Trainer. `distribute` serves plain PyTorch loops.
"""

from importlib import import_module
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

_PLACES = {  # imported when they are asked for
    "ElasticStrategy": "integrations.lightning.elastic.strategy",
    "RingFabricStrategy": "integrations.fabric",
    "RingStrategy": "integrations.lightning.strategy",
    "distribute": "loops.distribute",
}

register_strategies()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_posix(f"lightning_ring.{name}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
