"""Schedules: pure functions from the number of optimizer steps taken to the factor on the learning
rate.

Lengths are in optimizer steps (with gradient accumulation: not micro-batches). With
``steps_per_epoch`` they are in epochs, and may be fractions: ``warmup_poly(total=90, warmup=5,
steps_per_epoch=312)``. Step 0 is the first. A schedule has no state: the same step gives the same
factor whenever it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

Schedule = Callable[[int], float]


def gradual_warmup(
    warmup: float, *, start_factor: float = 0.0, steps_per_epoch: float = 1
) -> Schedule:
    """From ``start_factor`` in a straight line to 1 at step ``warmup``, then 1.

    Args:
        warmup: Length; 0 for none.
        start_factor: Factor at step 0, in [0, 1]. With 0 the first step has learning rate 0, and
            changes no weights. To begin at the unscaled learning rate, as in Goyal et al. 2017
            (arXiv:1706.02677, section 2.2): base batch size / global batch size.
        steps_per_epoch: Optimizer steps in one unit of ``warmup``.

    Raises:
        ValueError: An argument out of range.

    Examples:
        >>> factor = gradual_warmup(4)
        >>> [factor(step) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    # 1, without a step
    return _Schedule.of(warmup, start_factor, steps_per_epoch, partial(_staircase, (), 1.0))


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
    schedule = _Schedule.of(
        warmup, start_factor, steps_per_epoch, partial(_staircase, steps, gamma)
    )
    if not steps or any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(
            f"milestones={list(milestones)}, expected increasing numbers, at least one"
        )
    if steps[0] <= schedule.warmup:
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
    """Gradual warm-up, then half a cosine from 1 down to ``end_factor`` at step ``total``, and that
    from there on.

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
    """Gradual warm-up, then ``(1 - progress) ** power`` from 1 to ``end_factor`` at step ``total``;
    from there that.

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


@dataclass(frozen=True, slots=True)
class _Schedule:
    """``warmup`` steps up a straight line, then ``decay``, a function of the step too. Made of
    parts that pickle.
    """

    warmup: float
    start_factor: float
    decay: Callable[[float], float]

    @staticmethod
    def of(
        warmup: float, start_factor: float, steps_per_epoch: float, decay: Callable[[float], float]
    ) -> _Schedule:
        _require("warmup", warmup, warmup >= 0, ">= 0")
        _require("start_factor", start_factor, 0 <= start_factor <= 1, "in [0, 1]")
        _require("steps_per_epoch", steps_per_epoch, steps_per_epoch > 0, "> 0")
        return _Schedule(warmup * steps_per_epoch, start_factor, decay)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup
        return self.decay(step)


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
    schedule = _Schedule.of(
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
