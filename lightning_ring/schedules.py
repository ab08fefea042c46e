"""Learning rates for large batches: scaling, warm-up and decay.

A schedule is a pure function from optimizer step (0 is the first) to learning-rate factor. Lengths
are in optimizer steps, or with ``steps_per_epoch`` in epochs, fractions allowed:
``warmup_poly(total=90, warmup=5, steps_per_epoch=312)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "WarmupLR",
    "gradual_warmup",
    "linear_scaled_lr",
    "sqrt_scaled_lr",
    "warmup_cosine",
    "warmup_multistep",
    "warmup_poly",
]

Schedule = Callable[[int], float]


def gradual_warmup(
    warmup: float, *, start_factor: float = 0.0, steps_per_epoch: float = 1
) -> Schedule:
    """From ``start_factor`` in a straight line to 1 at step ``warmup``, then 1.

    Args:
        warmup: Length; 0 for none.
        start_factor: Factor at step 0, in [0, 1]. With 0 the first step changes no weights. To
            begin at the unscaled learning rate, as in Goyal et al. 2017 (arXiv:1706.02677, section
            2.2): base batch size / global batch size.
        steps_per_epoch: Optimizer steps in one unit of ``warmup``.

    Raises:
        ValueError: An argument out of range.

    Examples:
        >>> factor = gradual_warmup(4)
        >>> [factor(step) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return _warmed_up(warmup, start_factor, steps_per_epoch, partial(_staircase, (), 1.0))


def warmup_multistep(
    milestones: Sequence[float],
    warmup: float = 0,
    *,
    gamma: float = 0.1,
    start_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then times ``gamma`` from each milestone on (Goyal et al. 2017: 30, 60, 80
    epochs, warm-up 5).

    Raises:
        ValueError: An argument out of range, milestones that do not increase, or one within the
            warm-up.

    Examples:
        >>> factor = warmup_multistep([30, 60, 80], warmup=5, steps_per_epoch=100)
        >>> factor(2999), factor(3000)
        (1.0, 0.1)
    """
    steps = tuple(milestone * steps_per_epoch for milestone in milestones)
    schedule = _warmed_up(warmup, start_factor, steps_per_epoch, partial(_staircase, steps, gamma))
    if not steps or any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(
            f"milestones={list(milestones)}, expected increasing numbers, at least one"
        )
    if milestones[0] <= warmup:
        raise ValueError(f"the first milestone {milestones[0]} lies within the warm-up of {warmup}")
    _require("gamma", gamma, 0 < gamma <= 1, "in (0, 1]")
    return schedule


def warmup_cosine(
    total: float,
    warmup: float = 0,
    *,
    start_factor: float = 0.0,
    end_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then half a cosine from 1 to ``end_factor`` at step ``total``, then
    constant.

    Source: Loshchilov and Hutter, "SGDR" (2016, arXiv:1608.03983), equation 5, without restarts.

    Raises:
        ValueError: An argument out of range, or ``total`` not longer than ``warmup``.
    """
    return _decaying(_half_cosine, total, warmup, start_factor, end_factor, steps_per_epoch)


def warmup_poly(
    total: float,
    warmup: float = 0,
    *,
    power: float = 2.0,
    start_factor: float = 0.0,
    end_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then ``(1 - progress) ** power`` from 1 to ``end_factor`` at ``total``.

    Power 2 is MLPerf's schedule for LARS on ResNet-50.

    Raises:
        ValueError: An argument out of range, or ``total`` not longer than ``warmup``.

    Examples:
        >>> factor = warmup_poly(total=10, warmup=2)
        >>> factor(2), factor(6), factor(10), factor(11)
        (1.0, 0.25, 0.0, 0.0)
    """
    _require("power", power, power > 0, "> 0")
    return _decaying(
        partial(_polynomial, power), total, warmup, start_factor, end_factor, steps_per_epoch
    )


def _warmed_up(
    warmup: float, start_factor: float, steps_per_epoch: float, decay: Schedule
) -> Schedule:
    """Warm-up, then ``decay``. Made of parts that pickle."""
    _require("warmup", warmup, warmup >= 0, ">= 0")
    _require("start_factor", start_factor, 0 <= start_factor <= 1, "in [0, 1]")
    _require("steps_per_epoch", steps_per_epoch, steps_per_epoch > 0, "> 0")
    return partial(_rising, warmup * steps_per_epoch, start_factor, decay)


def _rising(warmup: float, start_factor: float, decay: Schedule, step: int) -> float:
    if step < warmup:
        return start_factor + (1 - start_factor) * step / warmup
    return decay(step)


def _decaying(
    shape: Callable[[float], float],
    total: float,
    warmup: float,
    start_factor: float,
    end_factor: float,
    steps_per_epoch: float,
) -> Schedule:
    """Warm-up, then ``shape`` of the progress (0 to 1) between 1 and ``end_factor``."""
    start, end = warmup * steps_per_epoch, total * steps_per_epoch
    schedule = _warmed_up(
        warmup, start_factor, steps_per_epoch, partial(_down_to, shape, start, end, end_factor)
    )
    _require("end_factor", end_factor, 0 <= end_factor <= 1, "in [0, 1]")
    _require("total", total, total > 0, "> 0")
    if total <= warmup:
        raise ValueError(
            f"total={total} is not longer than warmup={warmup}: the learning rate would never come "
            "down. Both are in the same unit, optimizer steps unless steps_per_epoch is given"
        )
    return schedule


def _down_to(
    shape: Callable[[float], float], start: float, end: float, end_factor: float, step: float
) -> float:
    return end_factor + (1 - end_factor) * shape(min((step - start) / (end - start), 1.0))


def _half_cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _polynomial(power: float, progress: float) -> float:
    return float((1 - progress) ** power)


def _staircase(milestones: Sequence[float], gamma: float, step: float) -> float:
    return float(gamma ** sum(step >= milestone for milestone in milestones))


def _require(name: str, value: float, holds: bool, expected: str) -> None:
    if not (holds and math.isfinite(value)):
        raise ValueError(f"{name}={value}, expected a finite number {expected}")


# -- the scheduler that applies a schedule to an optimizer


class WarmupLR(LRScheduler):
    """Each group's learning rate is its initial one times ``schedule(step)``.

    Call `step` once after each optimizer step; Lightning does with ``interval="step"``. The
    schedule is not saved: a resumed run uses the one given here.

    Args:
        optimizer: Any optimizer.
        schedule: Function from step to factor: one of ``lightning_ring.schedules``, or yours.
        last_epoch: The last step taken, -1 to begin.

    Raises:
        ValueError: ``schedule`` gives a factor that is negative or not a number at step 0.

    Examples:
        >>> optimizer = LARS(model.parameters(), lr=linear_scaled_lr(0.1, 8192))
        >>> scheduler = WarmupLR(optimizer, warmup_poly(total=90, warmup=5, steps_per_epoch=156))
        >>> every_step = {"scheduler": scheduler, "interval": "step"}
        >>> return {"optimizer": optimizer, "lr_scheduler": every_step}
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1) -> None:
        if not callable(schedule):
            raise ValueError(
                f"schedule={schedule!r}, expected a function from step to factor: warmup_poly(...)"
            )
        factor = schedule(0)
        if not factor >= 0:
            raise ValueError(f"schedule(0) is {factor}, expected a factor >= 0")
        self._schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The groups' learning rates at step ``last_epoch``."""
        factor = self._schedule(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint, without the schedule."""
        state = super().state_dict()
        del state["_schedule"]
        return state


# -- learning rate as a function of the global batch size


def linear_scaled_lr(base_lr: float, global_batch_size: int, base_batch_size: int = 256) -> float:
    """``base_lr * global_batch_size / base_batch_size``: the linear scaling rule, for SGD and LARS.

    Args:
        base_lr: Learning rate that is right for ``base_batch_size``.
        global_batch_size: Samples in one optimizer step, over ranks and accumulated micro-batches.
        base_batch_size: The batch size that ``base_lr`` was tuned for.

    Raises:
        ValueError: An argument that is not positive and finite.

    Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017, arXiv:1706.02677), section 2.1.

    Examples:
        >>> linear_scaled_lr(0.1, 8192)
        3.2
    """
    return base_lr * _ratio(base_lr, global_batch_size, base_batch_size)


def sqrt_scaled_lr(base_lr: float, global_batch_size: int, base_batch_size: int = 256) -> float:
    """``base_lr * sqrt(global_batch_size / base_batch_size)``: the square-root rule, for LAMB and
    Adam.

    Arguments and errors are those of `linear_scaled_lr`.

    Source: You et al., "Large Batch Optimization for Deep Learning" (2019, arXiv:1904.00962),
        section 4.

    Examples:
        >>> sqrt_scaled_lr(0.001, 1024)
        0.002
    """
    return base_lr * math.sqrt(_ratio(base_lr, global_batch_size, base_batch_size))


def _ratio(base_lr: float, global_batch_size: int, base_batch_size: int) -> float:
    _require("base_lr", base_lr, base_lr > 0, "> 0")
    _require("global_batch_size", global_batch_size, global_batch_size > 0, "> 0")
    _require("base_batch_size", base_batch_size, base_batch_size > 0, "> 0")
    return global_batch_size / base_batch_size
