"""Registers the strategies with Fabric, when Lightning is imported."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lightning_ring.algorithms import ALGORITHMS
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.posix import require_posix
from lightning_ring.integrations.lightning.registration import _after_import

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import ClusterEnvironment


def register_with_fabric() -> None:
    """Register "ring" and "ring_sharded" with Fabric, now or as soon as ``lightning.fabric`` is imported."""
    _after_import("lightning.fabric", _register)


def _register() -> None:
    """Also have Fabric take a `RingEnvironment` for them."""
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    for name in ALGORITHMS:
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(name, _ring, description="see lightning_ring.RingFabricStrategy", algorithm=name)
    choose = _Connector._choose_and_init_cluster_environment

    @functools.wraps(choose)
    def choose_ours_for_ours(connector: _Connector) -> ClusterEnvironment:
        if not (isinstance(connector._strategy_flag, str) and connector._strategy_flag in ALGORITHMS):
            return choose(connector)
        from lightning_ring.integrations.ranks.environment import RingEnvironment

        if (given := connector._cluster_environment_flag) is not None:
            raise ConfigurationError(
                f"Fabric(strategy={connector._strategy_flag!r}, plugins=[{type(given).__name__}()]): the strategy "
                "finds the ranks by itself and would ignore that cluster environment. Leave it out."
            )
        return RingEnvironment(caller="Fabric")

    _Connector._choose_and_init_cluster_environment = choose_ours_for_ours  # type: ignore[method-assign, assignment]


def _ring(**arguments: Any) -> Any:
    require_posix('Fabric(strategy="ring")')
    from lightning_ring.integrations.fabric.strategy import RingFabricStrategy

    return RingFabricStrategy(**arguments)
