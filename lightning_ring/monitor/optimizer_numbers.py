"""Numbers of optimizers and gradients for a log, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.host.accelerator import is_gpu


def gradient_squares(strategy: Any, optimizer: Optimizer) -> Tensor:
    """What this rank adds to the squared norm of the optimizer's gradients (0-d, float64).

    Under other strategies than ours what this rank holds.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if hasattr(strategy, "gradient_squares"):
        squares: Tensor = strategy.gradient_squares(params)
        return squares
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
    return norms.square().sum()


def learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Of each parameter group: ``SGD``, or ``SGD/1`` for the second group, ``SGD-1`` for the
    second SGD.
    """
    found: dict[str, float] = {}
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    for number, (kind, optimizer) in enumerate(zip(kinds, optimizers, strict=True)):
        earlier = kinds[:number].count(kind)
        name = f"{kind}-{earlier}" if earlier else kind
        for index, group in enumerate(optimizer.param_groups):
            if "lr" in group:  # an optimizer need not have one
                found[f"{name}/{index}" if index else name] = float(group["lr"])
    return found


def trust_ratios(optimizers: Sequence[Optimizer]) -> Tensor:
    """Last trust ratio of each parameter that adapts (LARS, LAMB), 1-D, on its way to the host;
    NaN without a step.
    """
    found: list[Tensor] = []
    for optimizer in optimizers:
        ratios = getattr(optimizer, "trust_ratios", None)
        if not isinstance(ratios, Tensor):
            continue
        adapts = [
            group.get("adapt", True) for group in optimizer.param_groups for _ in group["params"]
        ]
        places = torch.tensor(
            [place for place, adapt in enumerate(adapts) if adapt], dtype=torch.int64
        )
        chosen = ratios[places.to(ratios.device, non_blocking=True)]
        # the copy of all ranks' rows, which comes behind this one, is waited for
        if is_gpu(chosen.device):
            host = torch.empty(chosen.numel(), dtype=chosen.dtype, pin_memory=True)
            chosen = host.copy_(chosen, non_blocking=True)
        found.append(chosen)
    return torch.cat(found) if found else torch.empty(0)


class SkippedSteps:
    """Counts steps that a loss scaler left out, and adds what optimizers count themselves
    (``skip_nonfinite``).

    Without reading anything off the device: a step that `GradScaler` skips is one that was
    announced and not made.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self._optimizers = optimizers
        self._scales = scaler is not None
        # steps: gradients are unscaled; and the optimizer has stepped
        self.announced = self._made = 0
        # where the optimizer itself looks at what the scaler found
        self._found: Tensor | None = None
        self._hooks = (
            [one.register_step_post_hook(self._step_made) for one in optimizers]
            if self._scales
            else []
        )

    def count(self) -> tuple[float, Tensor]:
        """What the host knows, and what has to be added (0-d, float64, on the device perhaps)."""
        known = float(self.announced - self._made) if self._scales else 0.0
        known += sum(getattr(one, "skipped_steps", 0) for one in self._optimizers)
        return known, torch.zeros((), dtype=torch.float64) if self._found is None else self._found

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _step_made(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._made += 1
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            found = (found > 0).sum().double()
            self._found = found if self._found is None else self._found + found
