"""Calls an algorithm before and after the step of every optimizer in the process."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.gradients.backward import closure_of


class StepHooks:
    """Global hooks of torch's optimizers. They also cover optimizers that are built in the
    middle of a training.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
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
