"""Monitors, loggers and progress bars when ranks change."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_ring.elastic.rank_changes import RankChanges
from lightning_ring.monitor.ring_monitor import RingMonitor


def tell_monitors(trainer: pl.Trainer, changes: RankChanges) -> None:
    """Log on rank 0 that ranks have changed."""
    for monitor in _monitors(trainer):
        scalars = changes.scalars() | {"ring/standstill_ms": changes.seconds * 1e3}
        monitor.on_ranks_changed(trainer, scalars, changes.latest)


def remember_announced_steps(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep how many steps hooks have announced; returns what restores it."""
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


def names_of(loggers: list[Logger]) -> list[Any]:
    """The version of each logger."""
    return [logger.version for logger in loggers]


def take_names(loggers: list[Logger], names: list[Any]) -> None:
    """Write where rank 0 writes, to be able to follow it."""
    for logger, name in zip(loggers, names, strict=True):
        if hasattr(logger, "_version"):
            logger._version = name


def take_over(trainer: pl.Trainer, *, trains: bool) -> None:
    """Continue what rank 0 wrote and showed; ``trains``: within the training."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            go_on_with_csv(logger)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ProgressBar):
            callback.enable()  # it was told that another rank has it
            if trains:
                callback.setup(trainer, trainer.lightning_module, "fit")
                callback.on_train_start(trainer, trainer.lightning_module)
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


def go_on_with_csv(logger: CSVLogger) -> None:
    """Open the files of ``logger``, and keep their content."""
    folder = Path(logger.log_dir)
    path, hyperparameters = folder / "metrics.csv", folder / "hparams.yaml"
    # the logger deletes existing files; a rank that dies now leaves this one
    aside = folder / ".metrics.csv"
    if path.exists():
        path.replace(aside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it deletes it
        writer = logger.experiment
    kept = aside.read_bytes() if aside.exists() else b""
    if end := kept.rfind(b"\n") + 1:  # a rank that dies may leave half a line
        os.truncate(aside, end)
        aside.replace(path)
        writer.metrics_keys = next(csv.reader(io.StringIO(kept[:end].decode())))
    if hyperparameters.exists():
        # else it writes its own, which are none
        writer.hparams = load_hparams_from_yaml(str(hyperparameters))
