"""Manual optimization in an elastic fit: a training_step, with all that it steps, is one step
that is done again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


def remember_weights(strategy: ElasticStrategy) -> Callable[[], None]:
    """Keep parameters, optimizers and schedulers; the returned function restores them. A copy of
    all their tensors.
    """
    module = strategy.fit_model
    params = [(param, param.detach().clone(), param.requires_grad) for param in module.parameters()]
    optimizers = [(optimizer, *_state_of(optimizer)) for optimizer in strategy.optimizers]
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    kept_schedulers = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]

    @torch.no_grad()
    def restore() -> None:
        for param, kept, requires_grad in params:
            param.copy_(kept)
            # toggle_model() leaves it changed where an exception ends its block
            param.requires_grad_(requires_grad)
        vars(module).get("_param_requires_grad_state", {}).clear()
        for optimizer, state, groups in optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for scheduler, settings in zip(schedulers, kept_schedulers, strict=True):
            scheduler.load_state_dict(settings)

    return restore


def _state_of(optimizer: Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Copies of the state of each parameter, and of the settings of each group."""
    state = {
        key: {name: _copied(value) for name, value in of_one.items()}
        for key, of_one in optimizer.state.items()
    }
    settings = [
        {name: group[name] for name in group if name != "params"}
        for group in optimizer.param_groups
    ]
    return state, [{name: _copied(value) for name, value in group.items()} for group in settings]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


class OwnGradients:
    """Refuses an optimizer's step with gradients of an earlier training_step.

    A training_step that is done again begins without gradients, as a newcomer does.
    """

    def __init__(self) -> None:
        self._left: set[Optimizer] = set()  # with gradients of an earlier training_step

    def begin_step(self, optimizers: Sequence[Optimizer]) -> None:
        self._left = {
            optimizer
            for optimizer in optimizers
            if any(
                param.grad is not None
                for group in optimizer.param_groups
                for param in group["params"]
            )
        }

    @contextmanager
    def followed(self, optimizers: Sequence[LightningOptimizer]) -> Iterator[None]:
        """While the fit trains: notice ``zero_grad``, also of the optimizers inside, and look at
        each step.
        """
        handles = [wrapped.optimizer.register_step_pre_hook(self._check) for wrapped in optimizers]
        callers = [
            (caller, wrapped.optimizer)
            for wrapped in optimizers
            for caller in (wrapped, wrapped.optimizer)
        ]
        for caller, optimizer in callers:
            self._notice_zero_grad(caller, optimizer)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for caller, _ in callers:
                vars(caller).pop("zero_grad", None)

    def _notice_zero_grad(self, caller: Any, optimizer: Optimizer) -> None:
        plain = caller.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self._left.discard(optimizer)

        caller.zero_grad = zero_grad

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._left:
            raise ConfigurationError(
                f"{type(optimizer).__name__} is about to step with gradients of an earlier "
                "training_step: with manual optimization an elastic fit does a whole "
                "training_step again when a rank dies, and cannot bring those back. Call its "
                "zero_grad() in each training_step that steps it, and accumulate within one "
                "training_step, or use automatic optimization with accumulate_grad_batches."
            )
