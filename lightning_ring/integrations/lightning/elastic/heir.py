"""A rank that becomes rank 0 in the middle of a fit goes on with the files of the one before."""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger


def names_of(loggers: list[Logger]) -> list[Any]:
    """The version of each logger, which rank 0 has chosen."""
    return [logger.version for logger in loggers]


def take_names(loggers: list[Logger], names: list[Any]) -> None:
    """Write where rank 0 writes, should this rank follow it."""
    for logger, name in zip(loggers, names, strict=True):
        if hasattr(logger, "_version"):
            logger._version = name


def take_over(loggers: list[Logger]) -> None:
    """Open the files of ``loggers`` on the new rank 0, which go on where they were."""
    for logger in loggers:
        if not isinstance(logger, CSVLogger):
            continue
        path = Path(logger.log_dir) / "metrics.csv"
        kept = path.read_bytes() if path.exists() else b""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it deletes what is there: it is put back
            writer = logger.experiment
        if kept:
            path.write_bytes(kept)
            with contextlib.suppress(StopIteration):
                writer.metrics_keys = next(csv.reader(io.StringIO(kept.decode())))
