"""Checks of what users pass to the optimizers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def require_number(
    name: str, value: Any, *, low: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    """Raise `ValueError` unless ``value`` is a finite number with ``low <= value``, ``above < value < below``.

    A tensor must have one element; its value is read only where that needs no synchronization with a device.
    """
    bounds = [f">= {low}"] * (low is not None) + [f"> {above}"] * (above is not None)
    expected = " and ".join([*bounds, *[f"< {below}"] * (below is not None)]) or "finite"
    if isinstance(value, Tensor):
        require(value.numel() == 1, f"{name} is a tensor of shape {tuple(value.shape)}, expected one element")
        if value.device.type != "cpu":
            return
        value = value.item()
    require(isinstance(value, (int, float)), f"{name}={value!r}, expected a number {expected}")
    fits = (low is None or value >= low) and (above is None or value > above) and (below is None or value < below)
    require(math.isfinite(value) and fits, f"{name}={value}, expected a finite number {expected}")
