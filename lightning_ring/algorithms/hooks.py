"""Optimizers of a module; hooks on all optimizers of the process, and on a module without its
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_ring.comm.replicate import params_of
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.backward import closure_of


def steps_module(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether ``optimizer`` steps parameters of ``module``."""
    return not set(module.parameters()).isdisjoint(params_of(optimizer))


def check_same_parameters(
    params: Sequence[Parameter], first: Sequence[Parameter], algorithm: str
) -> None:
    """Raise `ConfigurationError` if other ``params`` are trained than at the ``first`` batch."""
    if [*map(id, params)] != [*map(id, first)]:
        raise ConfigurationError(
            "parameters were frozen, unfrozen or added after the first batch, and "
            f"{algorithm} goes on with those of it. Begin another training from a checkpoint, or "
            "use strategy 'ring'."
        )


class StepHooks:
    """Global hooks of torch's optimizers. They also cover optimizers that are built in the
    middle of a training.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm  # or what surrounds one, with these two methods
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._algorithm.before_step(optimizer, has_closure=closure_of(args, kwargs) is not None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._algorithm.after_step(optimizer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class UncopiedHook:
    """Calls ``hook``. A copy of the module, also a pickled one, has in its place a hook that
    does nothing.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> Any:
        # it takes any arguments, returns None, and is found where lightning_ring is not installed
        return getattr, (0, "__init__")
