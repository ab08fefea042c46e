"""The callbacks that watch a fit, when ranks die and come."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_ring.elastic.rank_changes import RankChanges
from lightning_ring.monitor.ring_monitor import RingMonitor


def tell_monitors(trainer: pl.Trainer, changes: RankChanges) -> None:
    """Ranks have changed; on rank 0, which may be another one than before, that is logged."""
    for monitor in _monitors(trainer):
        scalars = changes.scalars() | {"ring/standstill_ms": changes.seconds * 1e3}
        monitor.on_ranks_changed(trainer, scalars, changes.latest)


def remember_announced_steps(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep how many steps hooks have announced; the returned function restores it: a step is
    announced again.
    """
    counts = [
        (counted, counted.announced)
        for monitor in _monitors(trainer)
        if monitor.fit is not None and (counted := monitor.fit.skipped)
    ]

    def restore() -> None:
        for counted, announced in counts:
            counted.announced = announced

    return restore


def _monitors(trainer: pl.Trainer) -> list[RingMonitor]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, RingMonitor)]
