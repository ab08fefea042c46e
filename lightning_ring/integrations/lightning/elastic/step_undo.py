"""Takes back what Lightning and the module have changed in a training step, before it is done
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ring.elastic.undo import remember
from lightning_ring.integrations.lightning.elastic.watchers import remember_announced_steps

_LOGGED = (
    "value",
    "cumulated_batch_size",
    "_forward_cache",
    "_computed",
    "_update_count",
    "has_reset",
)


def remember_step(trainer: pl.Trainer, module: nn.Module) -> Callable[[], None]:
    """Keep buffers, random generators, metrics and logged results; the returned function
    restores them.
    """
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
    """Keep the counts of the step that has begun; the returned function restores them."""
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
    """Keep what the metrics of ``module`` have counted; the returned function restores it."""
    metrics = [
        (metric, _state(metric)) for metric in module.modules() if isinstance(metric, Metric)
    ]

    def restore() -> None:
        for metric, state in metrics:
            for name, value in state.items():
                setattr(metric, name, _copied(value))

    return restore


def remember_callbacks(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep what callbacks know that save or stop, since all ranks have to decide alike; the
    function restores it.
    """
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
