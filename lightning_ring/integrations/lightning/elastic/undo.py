"""Takes back what a training step has changed, before it is done again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_ring.comm.communicator import as_integers
from lightning_ring.elastic.undo import remember, remember_values
from lightning_ring.integrations.lightning.elastic.watchers import remember_announced_steps

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

_LOGGED = (
    "value",
    "cumulated_batch_size",
    "_forward_cache",
    "_computed",
    "_update_count",
    "has_reset",
)


def remember_step(trainer: pl.Trainer, module: nn.Module) -> Callable[[], None]:
    """Keep buffers, random generators, metrics and logged results; returns what restores them."""
    restore_module = remember(module)
    restore_metrics = remember_metrics(module)
    restore_announced = remember_announced_steps(trainer)
    loop = trainer.fit_loop.epoch_loop
    results = {key: (result, _attributes(result)) for key, result in loop._results.items()}

    @torch.no_grad()
    def restore() -> None:
        restore_module()
        restore_metrics()
        restore_announced()
        for key in list(loop._results):
            if key not in results:
                del loop._results[key]
        for result, attributes in results.values():
            for name, value in attributes.items():
                setattr(result, name, value)

    return restore


def remember_progress(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep the counts of the begun step; returns what restores them."""
    loop = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization
    progress: Any = (
        loop.automatic_optimization.optim_progress
        if automatic
        else loop.manual_optimization.optim_step_progress
    )
    kept = copy.deepcopy(progress.state_dict())

    def restore() -> None:
        progress.load_state_dict(copy.deepcopy(kept))
        if not automatic:
            with suppress(ValueError):  # it was not started
                # a step that raises leaves it started
                trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]

    return restore


def remember_metrics(module: nn.Module) -> Callable[[], None]:
    """Keep the metrics' counts; returns what restores them."""
    metrics = [
        (metric, _state(metric)) for metric in module.modules() if isinstance(metric, Metric)
    ]

    def restore() -> None:
        for metric, state in metrics:
            for name, value in state.items():
                setattr(metric, name, _copied(value))

    return restore


def remember_callbacks(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep the state of callbacks that save or stop; returns what restores it."""
    every = getattr(trainer, "callbacks", [])
    callbacks = [callback for callback in every if isinstance(callback, Checkpoint | EarlyStopping)]
    states = [
        {name: copy.copy(value) for name, value in vars(callback).items()} for callback in callbacks
    ]

    def restore() -> None:
        for callback, state in zip(callbacks, states, strict=True):
            vars(callback).update({name: copy.copy(value) for name, value in state.items()})

    return restore


def _state(metric: Metric) -> dict[str, Any]:
    state = {name: _copied(value) for name, value in metric.metric_state.items()}
    return state | {"_update_count": metric._update_count, "_computed": None}


def _attributes(result: Any) -> dict[str, Any]:
    return {name: _copied(getattr(result, name)) for name in _LOGGED if hasattr(result, name)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


_STARTS = ("on_validation_start", "on_validation_epoch_start")
_EXCHANGING = tuple(
    getattr(of_lightning, name)
    for name in ("LambdaCallback", "WeightAveraging")
    if hasattr(of_lightning, name)
)
_OF_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_ring.")


def remember_exchanged_weights(
    trainer: pl.Trainer, module: pl.LightningModule
) -> Callable[[], None]:
    """Keep weights that hooks may exchange for a validation; returns what restores them.

    Copies the module, and tensors and modules of callbacks with such hooks, if there are any.
    """
    callbacks = [callback for callback in trainer.callbacks if _may_exchange(callback)]  # type: ignore[attr-defined]
    if not callbacks and not _overrides(module, pl.LightningModule):
        return lambda: None
    attributes = [
        {name: _shallow(value) for name, value in vars(callback).items()} for callback in callbacks
    ]
    held = [leaf for callback in callbacks for leaf in tree_leaves(list(vars(callback).values()))]
    modules = [module, *(leaf for leaf in held if isinstance(leaf, nn.Module))]
    tensors = chain.from_iterable(chain(part.parameters(), part.buffers()) for part in modules)
    restore_values = remember_values(
        [*tensors, *(leaf for leaf in held if isinstance(leaf, Tensor))]
    )

    def restore() -> None:
        restore_values()
        for callback, values in zip(callbacks, attributes, strict=True):
            vars(callback).update({name: _shallow(value) for name, value in values.items()})

    return restore


class ChangedInSteps:
    """Finds parameters that a step changes before its optimizer, such as a momentum encoder's.

    It compares sums of all parameters in steps 1, 2, 4, 8, ... of this process. What it has found
    is restored from the next step on.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._found: dict[int, nn.Parameter] = {}
        self._before: tuple[list[nn.Parameter], list[int]] | None = None

    def begin_step(self, module: nn.Module) -> Callable[[], None]:
        """Keep the found parameters; returns what restores them."""
        self._num_steps += 1
        self._before = None
        if self._num_steps & (self._num_steps - 1) == 0:
            others = [
                param
                for param in module.parameters()
                if id(param) not in self._found and _is_dense(param)
            ]
            self._before = others, _sums(others)
        return remember_values(self._found.values())

    def end_step(self) -> None:
        if self._before is not None:
            params, sums = self._before
            now = _sums(params)
            self._found |= {
                id(param): param
                for param, old, new in zip(params, sums, now, strict=True)
                if old != new
            }
            self._before = None


def _may_exchange(callback: Callback) -> bool:
    known = type(callback).__module__.startswith(_OF_LIBRARIES)
    return _overrides(callback, Callback) and (not known or isinstance(callback, _EXCHANGING))


def _overrides(one: Any, kind: type) -> bool:
    return any(
        getattr(getattr(one, name), "__func__", None) is not getattr(kind, name) for name in _STARTS
    )


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _is_dense(param: Tensor) -> bool:
    return (
        param.is_floating_point()
        and param.layout == torch.strided
        and not nn.parameter.is_lazy(param)
    )


@torch.no_grad()
def _sums(params: Iterable[Tensor]) -> list[int]:
    return [int(as_integers(param.detach()).sum(dtype=torch.int64)) for param in params]


def forget_unscaling(precision: Any) -> None:
    """Let a scaler divide the gradients of this step again."""
    if (scaler := getattr(precision, "scaler", None)) is not None:
        scaler._per_optimizer_states.clear()


@contextmanager
def already_unscaled(precision: Any) -> Iterator[None]:
    """Around a step of averages that are already divided and checked."""
    if (scaler := getattr(precision, "scaler", None)) is None:
        yield
        return
    scaler.unscale_ = lambda optimizer: None
    try:
        yield
    finally:
        del scaler.unscale_


def remember_weights(strategy: ElasticStrategy) -> Callable[[], None]:
    """Copy parameters, optimizers and schedulers; returns what restores them."""
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
    state = {
        key: {name: _copy_of(value) for name, value in of_one.items()}
        for key, of_one in optimizer.state.items()
    }
    settings = [
        {name: group[name] for name in group if name != "params"}
        for group in optimizer.param_groups
    ]
    return state, [{name: _copy_of(value) for name, value in group.items()} for group in settings]


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
