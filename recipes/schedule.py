"""Schedules whose lengths a configuration gives in epochs."""

from __future__ import annotations

from collections.abc import Callable

Schedule = Callable[[int], float]


def in_epochs(total: int, schedule: Callable[..., Schedule], epochs: float) -> Schedule:
    """``schedule`` with lengths in epochs, for a run of ``total`` optimizer steps in ``epochs``.

    Args:
        total: Optimizer steps of the whole run.
        schedule: One of `lightning_ring.schedules`, which takes ``steps_per_epoch``.
        epochs: Of the whole run.
    """
    return schedule(steps_per_epoch=total / epochs)
