"""The options of a step, the checks of them, and the choice of a way to run it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.fused import triton_is_here


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def require_number(
    name: str, value: Any, *, positive: bool = False, below: float = math.inf
) -> None:
    """Raise `ValueError` unless ``value`` is a finite number >= 0 (> 0 if ``positive``) and <
    ``below``.

    A tensor must have one element; its value is read on the CPU only, which needs no
    synchronization.
    """
    if isinstance(value, Tensor):
        require(
            value.numel() == 1,
            f"{name} is a tensor of shape {tuple(value.shape)}, expected one element",
        )
        if value.device.type != "cpu":
            return
        value = value.item()
    expected = "> 0" if positive else ">= 0"
    fits = isinstance(value, int | float) and (value > 0 if positive else value >= 0)
    if below < math.inf:
        expected += f" and < {below}"
    require(fits and value < below, f"{name}={value!r}, expected a finite number {expected}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run the step: the same for all groups, and no part of a checkpoint."""

    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False
    skip_nonfinite: bool = False
    master_weights: bool = False
    max_grad_norm: float | None = None


def check_options(options: RunOptions, params: Iterable[Tensor]) -> None:
    """Raises `ValueError` for options that exclude each other or have no kernel on a parameter's
    device, and `RuntimeError` for ``fused=True`` without Triton."""
    require(
        not (options.foreach and options.fused), "foreach=True and fused=True: choose one of them"
    )
    require(
        not (options.capturable and options.skip_nonfinite),
        "capturable=True and skip_nonfinite=True: a CUDA graph cannot decide whether to step; "
        "choose one of them",
    )
    if options.fused:
        for device in {param.device for param in params}:
            require(
                # Triton's interpreter runs the kernels on the CPU too, to check them
                device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1",
                f"fused=True has kernels for cuda, found a parameter on {device}; leave fused=None",
            )
            if not triton_is_here():
                raise RuntimeError("fused=True needs Triton: install triton, or leave fused=None")


def way_to_run(options: RunOptions, device: torch.device, is_flat: bool) -> str:
    """``"plain"``, ``"foreach"`` or ``"fused"``, for parameters on ``device``.

    Only the plain way takes a weight, gradient and state that do not lie in memory in the same
    order without gaps (`lie_alike`).
    """
    if not is_flat:
        return "plain"
    if options.fused:
        return "fused"
    if options.foreach:
        return "foreach"
    if options.foreach is None and options.fused is None:
        return "fused" if device.type == "cuda" and triton_is_here() else "foreach"
    return "plain"
