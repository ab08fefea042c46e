"""Schedules of a whole run, with lengths in optimizer steps or in epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Schedule = Callable[[int], float]


def of_run(
    total: int,
    schedule: Callable[..., Schedule],
    epochs: float,
    warmup: float = 0,
    warmup_epochs: float | None = None,
    milestone_epochs: Sequence[float] | None = None,
    **settings: Any,
) -> Schedule:
    """``schedule`` for a run of ``total`` optimizer steps in ``epochs``.

    Args:
        total: Optimizer steps of the whole run.
        schedule: One of `lightning_ring.schedules`; ``settings`` are further arguments of it.
        epochs: Of the whole run.
        warmup: Optimizer steps.
        warmup_epochs: Length of the warm-up in epochs, if not `None`, instead of ``warmup``.
        milestone_epochs: For `warmup_multistep`.
    """
    steps_per_epoch = total / epochs
    if warmup_epochs is not None:
        warmup = warmup_epochs * steps_per_epoch
    if milestone_epochs is not None:
        return schedule([epoch * steps_per_epoch for epoch in milestone_epochs], warmup, **settings)
    return schedule(total, warmup, **settings)
