"""Registers the strategies with Fabric, when Lightning is imported."""

from __future__ import annotations

from typing import Any

from lightning_ring.algorithms import ALGORITHMS
from lightning_ring.host.posix import require_posix
from lightning_ring.integrations.lightning.registration import _after_import, choose_our_environment


def register_with_fabric() -> None:
    """Register "ring" and "ring_sharded" with Fabric, now or as soon as ``lightning.fabric`` is
    imported.
    """
    _after_import("lightning.fabric", _register)


def _register() -> None:
    """Also have Fabric take a `RingEnvironment` for them."""
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    for name in ALGORITHMS:
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(
                name, _ring, description="see lightning_ring.RingFabricStrategy", algorithm=name
            )
    choose_our_environment(_Connector, tuple(ALGORITHMS), "Fabric")


def _ring(**arguments: Any) -> Any:
    require_posix('Fabric(strategy="ring")')
    from lightning_ring.integrations.fabric.strategy import RingFabricStrategy

    return RingFabricStrategy(**arguments)
