"""Progress under mpirun, and where output is no terminal."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
from collections import Counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

_OF_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def widen_terminal() -> None:
    """Give a terminal of 0 columns the width in ``COLUMNS``, or 80.

    mpirun connects each rank's output to such a pseudo-terminal, and tqdm draws nothing where
    nothing fits. Does nothing where output is no terminal, or has a width.
    """
    if os.name != "posix" or not sys.stdout.isatty():
        return
    import fcntl  # POSIX only
    import termios

    descriptor = sys.stdout.fileno()
    if os.get_terminal_size(descriptor).columns == 0:
        columns, lines = shutil.get_terminal_size()
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def shown_on_terminal() -> bool:
    """Whether a person sees this process's output: mpirun's pseudo-terminal may lead into a
    file.
    """
    if not sys.stdout.isatty():
        return False
    if not any(name in os.environ for name in _OF_MPIRUN):
        return True
    try:
        output = os.readlink(f"/proc/{os.getppid()}/fd/1")
    except OSError:  # another system than Linux, or not allowed
        return True
    return output.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def replace_bars(trainer: Trainer) -> None:
    """Where output is no terminal, let `EpochLines` and plain text take the place of Lightning's
    bars and Rich tables.

    They would fill a file with the escape sequences that draw them. Callbacks of the user's classes
    are left alone.
    """
    if shown_on_terminal():
        return
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for place, one in enumerate(callbacks):
        if type(one) in (RichProgressBar, TQDMProgressBar):
            callbacks[place] = EpochLines()
        elif type(one) is RichModelSummary:
            callbacks[place] = ModelSummary(one._max_depth)


class EpochLines(ProgressBar):
    """One line of text for each epoch, with the metrics that a progress bar shows."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._began = 0.0

    @property
    def is_enabled(self) -> bool:
        """`LightningModule.print` asks for it; Lightning's base class lacks it."""
        return self._enabled

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled:
            numbers = short(self.get_metrics(trainer, pl_module))
            texts = {
                name: f"{value:.4g}" if isinstance(value, float) else value
                for name, value in numbers.items()
            }
            shown = [f"{name} {text}" for name, text in texts.items()]
            seconds = time.perf_counter() - self._began
            epoch = (
                f"epoch {trainer.current_epoch}: {trainer.fit_loop.epoch_loop.batch_idx + 1} "
                f"batches in {seconds:.1f} s"
            )
            self.print(", ".join([epoch, *shown]), flush=True)


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
