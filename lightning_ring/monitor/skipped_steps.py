"""How many steps were left out because gradients were not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SkippedSteps:
    """Counts steps that a loss scaler left out, and adds what optimizers count themselves (``skip_nonfinite``).

    Without reading anything off the device: a step that `GradScaler` skips is one that was announced and not made.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self._optimizers = optimizers
        self._scales = scaler is not None
        self._announced = self._made = 0
        self._found: Tensor | None = None  # where the optimizer itself looks at what the scaler found
        self._hooks = [one.register_step_post_hook(self._step_made) for one in optimizers] if self._scales else []

    def step_announced(self) -> None:
        """Gradients are unscaled, and the optimizer's step comes next."""
        self._announced += 1

    def count(self) -> tuple[float, Tensor]:
        """What the host knows, and what has to be added (0-d, float64, on the device perhaps)."""
        known = float(self._announced - self._made) if self._scales else 0.0
        counts = [self._found, *(vars(one).get("_skipped") for one in self._optimizers)]
        pending = torch.zeros((), dtype=torch.float64)
        for count in counts:
            if isinstance(count, Tensor):
                pending = pending.to(count.device) + count
            elif count is not None:
                known += count
        return known, pending

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
