"""A Trainer as it was before something trained it for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ring.host.random_state import collect_random_state, restore_random_state


@contextmanager
def borrowed(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Inside, ``module`` may be trained; on leaving, training goes on as if nothing had happened.

    Put back are parameters, buffers, gradients, optimizers, the loss scaler, learning-rate
    schedulers, the loop's counters, everything that was logged, torchmetrics objects, loaders'
    positions, and all random states. Costs a copy of parameters and optimizer state.
    """
    loop = trainer.fit_loop.epoch_loop
    module_state = {name: _copied(value) for name, value in module.state_dict().items()}
    buffers = _buffers(module)  # those that a state_dict leaves out, too
    gradients = [(param, param.grad) for param in module.parameters()]
    combined = trainer.fit_loop._combined_loader
    parts: list[Any] = [
        *trainer.optimizers,
        trainer.precision_plugin,
        *(config.scheduler for config in trainer.lr_scheduler_configs),
        loop,
        *(
            loader
            for loader in (combined.flattened if combined is not None else ())
            if hasattr(loader, "state_dict")
        ),
    ]
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    metrics = [
        (metric, copy.deepcopy(metric)) for metric in module.modules() if isinstance(metric, Metric)
    ]
    random_state = collect_random_state()
    for param, _ in gradients:
        param.grad = None
    try:
        yield
    finally:
        for place, name, buffer, _ in buffers:
            place[name] = buffer  # a step may have put another tensor in its place
        # a module may save a part of itself only
        module.load_state_dict(module_state, strict=False)
        with torch.no_grad():
            for _, _, buffer, values in buffers:
                buffer.copy_(values)
        for param, gradient in gradients:
            param.grad = gradient
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        loop._results.reset()
        for metric, before in metrics:
            metric.__dict__.update(before.__dict__)
        restore_random_state(random_state)


def _copied(value: Any) -> Any:
    """``value`` of a state_dict: a tensor, or what a ``get_extra_state`` gave."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _buffers(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]]:
    """Every buffer: where it is kept, under which name, and a copy."""
    return [
        (part._buffers, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
