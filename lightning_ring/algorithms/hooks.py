"""Optimizers of a module; hooks on all optimizers of the process, and on a module without its
copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_ring.comm.replicate import params_of
from lightning_ring.gradients.backward import closure_of


def steps_module(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether ``optimizer`` steps parameters of ``module``."""
    return not set(module.parameters()).isdisjoint(params_of(optimizer))


class StepHooks:
    """Global hooks of torch's optimizers. They also cover optimizers that are built in the
    middle of a training.
    """

    def __init__(self, algorithm: Any) -> None:  # or what surrounds one, with two of its methods
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            algorithm.before_step(optimizer, has_closure=closure_of(args, kwargs) is not None)

        self._handles = [
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(
                lambda optimizer, *_: algorithm.after_step(optimizer)
            ),
        ]

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
