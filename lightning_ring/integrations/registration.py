"""Registers the strategies when Lightning is imported.

Importing Lightning takes seconds, which ``ringrun``, data-loader workers, and many scripts do not
need.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_ring.algorithms import ALGORITHMS, algorithm_class
from lightning_ring.errors import ConfigurationError
from lightning_ring.host import require_posix

_ELASTIC = "ring_elastic"
_NAMES = (*ALGORITHMS, _ELASTIC)


def register_strategies() -> None:
    """Register `ALGORITHMS` with the Trainer and Fabric, and "ring_elastic" with the Trainer."""
    _after_import("lightning.pytorch", _register_with_the_trainer)
    _after_import("lightning.fabric", _register_with_fabric)
    _after_import("pytorch_lightning", _register_with_the_other_package)


def _register_with_the_trainer() -> None:
    from lightning.pytorch.strategies import StrategyRegistry
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    _add(StrategyRegistry, _NAMES, _new, "Trainer")
    choose_our_environment(_AcceleratorConnector, _NAMES, "Trainer")


def _register_with_fabric() -> None:
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    _add(STRATEGY_REGISTRY, ALGORITHMS, _new, "Fabric")
    choose_our_environment(_Connector, ALGORITHMS, "Fabric")


def _register_with_the_other_package() -> None:
    from pytorch_lightning.strategies import StrategyRegistry

    _add(StrategyRegistry, _NAMES, _refuse, "Trainer")


def _add(registry: Any, names: Iterable[str], make: Callable[..., Any], caller: str) -> None:
    for name in names:
        if name not in registry:  # a strategy of the user's stays
            registry.register(name, make, "of lightning_ring", caller=caller, named=name)


def choose_our_environment(connector: type, names: Iterable[str], caller: str) -> None:
    """Have ``connector`` take a `RingEnvironment` for a strategy of ``names``.

    Lightning chooses a cluster environment before it builds the strategy. Its `SLURMEnvironment`
    would refuse ``srun -n 2`` (it wants ``--ntasks-per-node``), its `MPIEnvironment` start MPI in a
    process that may not be a rank. It offers no way to say so earlier. A cluster environment among
    the plugins is refused.
    """
    check: Callable[..., None] = connector._check_config_and_set_final_flags  # type: ignore[attr-defined]

    @functools.wraps(check)
    def check_without_environments(
        self: Any, *, strategy: Any, plugins: Any, **others: Any
    ) -> None:
        by_name = isinstance(strategy, str) and strategy.lower() in names
        environment = None
        if by_name or hasattr(type(strategy), "ring_environment"):
            from lightning_ring.integrations.ranks.environment import environment_of

            environment = environment_of(strategy, plugins, caller)
        check(self, strategy=strategy, plugins=plugins, **others)
        if environment is not None:
            self._cluster_environment_flag = environment

    connector._check_config_and_set_final_flags = check_without_environments  # type: ignore[attr-defined]


def _new(caller: str, named: str) -> Any:
    require_posix(f"{caller}(strategy={named!r})")
    import lightning_ring

    if caller == "Fabric":
        return lightning_ring.RingFabricStrategy(algorithm=named)
    if named == _ELASTIC:
        return lightning_ring.ElasticStrategy()
    return lightning_ring.RingStrategy(algorithm=algorithm_class(named)())


def _refuse(**_: Any) -> None:
    raise ConfigurationError(
        "Trainer(strategy='ring') of pytorch_lightning was called. lightning_ring works with the "
        "package `lightning`: write `import lightning as L` or `import lightning.pytorch as pl` "
        "in place of `import pytorch_lightning as pl`, everywhere."
    )


def _after_import(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


@dataclass
class _Finder(MetaPathFinder):
    """Finds one module as other finders do, and calls ``then`` after its execution.

    Lightning loads entry points for callbacks only, and Python has no hook after an import.
    """

    name: str
    then: Callable[[], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
