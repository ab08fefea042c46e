"""Lightning's progress bars, with what has to be read at 80 columns: loss, metrics, one rate,
the slowest rank.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

OF_MONITOR = ("img/s", "slowest", "data", "comm")
"""Behind the user's own metrics; the last ones are left out first."""
_WIDE = 110  # columns that have room for the time too


def narrow(trainer: Trainer) -> None:
    """Let Lightning's own bar show `short` metrics and no iterations per second; a bar of the
    user's class is left.
    """
    bar = trainer.progress_bar_callback
    kinds: dict[type, type] = {TQDMProgressBar: NarrowTQDM, RichProgressBar: NarrowRich}
    if type(bar) in kinds:
        bar.__class__ = kinds[type(bar)]  # keeps the settings that the user gave it


def short(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the version, ``train/loss`` as ``loss`` where no other metric ends so, the monitor's
    at the end.

    ``rank 1 +701 ms`` becomes ``1+701ms``.
    """
    ends = Counter(name.rpartition("/")[2] for name in metrics if name not in OF_MONITOR)
    named: dict[str, Any] = {}
    for name, value in metrics.items():
        end = name.rpartition("/")[2]
        if name not in OF_MONITOR and name != "v_num":
            named[end if ends[end] == 1 else name] = value
    return named | {
        name: metrics[name].removeprefix("rank").replace(" ", "")
        for name in OF_MONITOR
        if name in metrics
    }


class NarrowTQDM(TQDMProgressBar):
    """A line for the training; what does not fit is left out from the end."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return short(super().get_metrics(*args))

    def init_train_tqdm(self) -> Tqdm:
        time = " {elapsed}<{remaining}" if shutil.get_terminal_size().columns >= _WIDE else ""
        return _Line(
            position=2 * self.process_position,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format="{desc} {n_fmt}/{total_fmt}" + time + "{postfix}",
        )


class _Line(Tqdm):
    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        if self.disable:
            return
        items = [
            f"{name}={value if isinstance(value, str) else self.format_num(value)}"
            for name, value in (ordered_dict or {}).items()
        ]
        self.postfix = " ".join(items)
        while items and len(self.format_meter(**self.format_dict | {"ncols": None})) > (
            self.ncols or sys.maxsize
        ):
            items.pop()
            self.postfix = " ".join(items)
        if refresh:
            self.refresh()


class NarrowRich(RichProgressBar):
    """Rich puts metrics that do not fit into further lines."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return short(super().get_metrics(*args))

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        from lightning.pytorch.callbacks.progress.rich_progress import (
            CustomBarColumn,
            ProcessingSpeedColumn,
        )

        wide = shutil.get_terminal_size().columns >= _WIDE
        return [
            column
            for column in super().configure_columns(trainer)
            if not isinstance(column, ProcessingSpeedColumn)
            and (wide or not isinstance(column, CustomBarColumn))
        ]
