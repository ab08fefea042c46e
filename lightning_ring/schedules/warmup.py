"""Schedules: pure functions from the number of optimizer steps taken to the factor on the learning rate.

Lengths are in optimizer steps (with gradient accumulation: not micro-batches). With ``steps_per_epoch`` they are in
epochs, and may be fractions: ``warmup_poly(total=90, warmup=5, steps_per_epoch=312)``. Step 0 is the first. A schedule
has no state: the same step gives the same factor whenever it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Schedule = Callable[[int], float]


def gradual_warmup(warmup: float, *, start_factor: float = 0.0, steps_per_epoch: float = 1) -> Schedule:
    """From ``start_factor`` in a straight line to 1 at step ``warmup``, then 1.

    Args:
        warmup: Length; 0 for none.
        start_factor: Factor at step 0, in [0, 1]. To begin at the unscaled learning rate, as in Goyal et al. 2017
            (arXiv:1706.02677, section 2.2): base batch size / global batch size.
        steps_per_epoch: Optimizer steps in one unit of ``warmup``.

    Raises:
        ValueError: An argument out of range.

    Examples:
        >>> factor = gradual_warmup(4)
        >>> [factor(step) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return _Constant(_Warmup.of(warmup, start_factor, steps_per_epoch))


def warmup_multistep(
    milestones: Sequence[float],
    warmup: float = 0,
    *,
    gamma: float = 0.1,
    start_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then times ``gamma`` from each milestone on (Goyal et al. 2017: 30, 60, 80 epochs, warm-up 5).

    Raises:
        ValueError: An argument out of range, milestones that do not increase, or one within the warm-up.

    Examples:
        >>> factor = warmup_multistep([30, 60, 80], warmup=5, steps_per_epoch=100)
        >>> factor(2999), factor(3000)
        (1.0, 0.1)
    """
    ramp = _Warmup.of(warmup, start_factor, steps_per_epoch)
    steps = tuple(milestone * steps_per_epoch for milestone in milestones)
    if not steps or any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"milestones={list(milestones)}, expected increasing numbers, at least one")
    if steps[0] <= ramp.steps:
        raise ValueError(f"the first milestone {milestones[0]} lies within the warm-up of {warmup}")
    _require("gamma", gamma, 0 < gamma <= 1, "in (0, 1]")
    return _MultiStep(ramp, steps, gamma)


def warmup_cosine(
    total: float,
    warmup: float = 0,
    *,
    start_factor: float = 0.0,
    end_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then half a cosine from 1 down to ``end_factor`` at step ``total``, and that from there on.

    Source: Loshchilov and Hutter, "SGDR" (2016, arXiv:1608.03983), equation 5, without restarts.

    Raises:
        ValueError: An argument out of range, or ``total`` not longer than ``warmup``.
    """
    ramp, end = _bounds(total, warmup, start_factor, end_factor, steps_per_epoch)
    return _Cosine(ramp, end, end_factor)


def warmup_poly(
    total: float,
    warmup: float = 0,
    *,
    power: float = 2.0,
    start_factor: float = 0.0,
    end_factor: float = 0.0,
    steps_per_epoch: float = 1,
) -> Schedule:
    """Gradual warm-up, then ``(1 - progress) ** power`` from 1 to ``end_factor`` at step ``total``; from there that.

    Power 2 is MLPerf's schedule for LARS on ResNet-50.

    Raises:
        ValueError: An argument out of range, or ``total`` not longer than ``warmup``.

    Examples:
        >>> factor = warmup_poly(total=10, warmup=2)
        >>> factor(2), factor(6), factor(10), factor(11)
        (1.0, 0.25, 0.0, 0.0)
    """
    ramp, end = _bounds(total, warmup, start_factor, end_factor, steps_per_epoch)
    _require("power", power, power > 0, "> 0")
    return _Polynomial(ramp, end, end_factor, power)


@dataclass(frozen=True, slots=True)
class _Warmup:
    steps: float
    start_factor: float

    @staticmethod
    def of(warmup: float, start_factor: float, steps_per_epoch: float) -> _Warmup:
        _require("warmup", warmup, warmup >= 0, ">= 0")
        _require("start_factor", start_factor, 0 <= start_factor <= 1, "in [0, 1]")
        _require("steps_per_epoch", steps_per_epoch, steps_per_epoch > 0, "> 0")
        return _Warmup(warmup * steps_per_epoch, start_factor)

    def __call__(self, step: float) -> float:
        return self.start_factor + (1 - self.start_factor) * step / self.steps


@dataclass(frozen=True, slots=True)
class _Constant:
    warmup: _Warmup

    def __call__(self, step: int) -> float:
        return self.warmup(step) if step < self.warmup.steps else 1.0


@dataclass(frozen=True, slots=True)
class _MultiStep:
    warmup: _Warmup
    milestones: tuple[float, ...]
    gamma: float

    def __call__(self, step: int) -> float:
        if step < self.warmup.steps:
            return self.warmup(step)
        return self.gamma ** sum(step >= milestone for milestone in self.milestones)


@dataclass(frozen=True, slots=True)
class _Cosine:
    warmup: _Warmup
    total: float
    end_factor: float

    def __call__(self, step: int) -> float:
        if step < self.warmup.steps:
            return self.warmup(step)
        remaining = (1 + math.cos(math.pi * _progress(step, self.warmup.steps, self.total))) / 2
        return self.end_factor + (1 - self.end_factor) * remaining


@dataclass(frozen=True, slots=True)
class _Polynomial:
    warmup: _Warmup
    total: float
    end_factor: float
    power: float

    def __call__(self, step: int) -> float:
        if step < self.warmup.steps:
            return self.warmup(step)
        remaining = (1 - _progress(step, self.warmup.steps, self.total)) ** self.power
        return self.end_factor + (1 - self.end_factor) * remaining


def _progress(step: float, start: float, end: float) -> float:
    return min((step - start) / (end - start), 1.0)


def _bounds(
    total: float, warmup: float, start_factor: float, end_factor: float, steps_per_epoch: float
) -> tuple[_Warmup, float]:
    ramp = _Warmup.of(warmup, start_factor, steps_per_epoch)
    _require("end_factor", end_factor, 0 <= end_factor <= 1, "in [0, 1]")
    _require("total", total, total > 0, "> 0")
    if total <= warmup:
        raise ValueError(
            f"total={total} is not longer than warmup={warmup}: the learning rate would never come down. "
            "Both are in the same unit, optimizer steps unless steps_per_epoch is given"
        )
    return ramp, total * steps_per_epoch


def _require(name: str, value: float, holds: bool, expected: str) -> None:
    if not (holds and math.isfinite(value)):
        raise ValueError(f"{name}={value}, expected a finite number {expected}")
