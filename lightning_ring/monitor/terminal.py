"""Progress under mpirun, where output is no terminal, and on bars of 80 columns: loss, metrics, one
rate, the slowest rank.
"""

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
OF_MONITOR = ("img/s", "slowest", "data", "comm")
"""After the user's own metrics; the last ones are left out first."""


def widen_terminal() -> None:
    """Give a terminal of 0 columns the width in ``COLUMNS``, or 80.

    mpirun connects each rank's output to such a pseudo-terminal, and tqdm draws nothing where
    nothing fits. Does nothing where output is no terminal, or has a width.
    """
    if os.name != "posix" or not sys.stdout.isatty():
        return
    # POSIX only
    import fcntl
    import termios

    descriptor = sys.stdout.fileno()
    if os.get_terminal_size(descriptor).columns == 0:
        columns, lines = shutil.get_terminal_size()
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def shown_on_terminal() -> bool:
    """Whether a person sees this process's output: mpirun's pseudo-terminal may lead into a
    file.
    """
    if not sys.stdout.isatty() or not any(name in os.environ for name in _OF_MPIRUN):
        return sys.stdout.isatty()
    try:
        output = os.readlink(f"/proc/{os.getppid()}/fd/1")
    except OSError:
        # another system than Linux, or not allowed
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

    # `LightningModule.print` asks for it; Lightning's base class lacks it
    is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def on_train_epoch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled:
            seconds = time.perf_counter() - self._began
            batches = trainer.fit_loop.epoch_loop.batch_idx + 1
            shown = [f"epoch {trainer.current_epoch}: {batches} batches in {seconds:.1f} s"]
            for name, value in short(self.get_metrics(trainer, pl_module)).items():
                text = f"{value:.4g}" if isinstance(value, float) else value
                shown.append(f"{name} {text}")
            self.print(", ".join(shown), flush=True)


def narrow(trainer: Trainer) -> None:
    """Let Lightning's own bar show `short` metrics and no iterations per second; a bar of the
    user's class is left.
    """
    bar = trainer.progress_bar_callback
    kinds: dict[type, type] = {TQDMProgressBar: NarrowTQDM, RichProgressBar: NarrowRich}
    if type(bar) in kinds:
        # keeps the settings that the user gave it
        bar.__class__ = kinds[type(bar)]


def short(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without the version, ``train/loss`` as ``loss`` where no other metric ends so, the monitor's
    at the end.

    ``rank 1 +701 ms`` becomes ``1+701ms``.
    """
    own = {name: name.rpartition("/")[2] for name in metrics if name not in (*OF_MONITOR, "v_num")}
    ends = Counter(own.values())
    named = {end if ends[end] == 1 else name: metrics[name] for name, end in own.items()}
    for name in OF_MONITOR:
        if name in metrics:
            named[name] = metrics[name].removeprefix("rank").replace(" ", "")
    return named


def _wide() -> bool:
    """Whether there is room for the time too."""
    return shutil.get_terminal_size().columns >= 110


class NarrowTQDM(TQDMProgressBar):
    """A line for the training; what does not fit is left out from the end."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return short(super().get_metrics(*args))

    def init_train_tqdm(self) -> Tqdm:
        clock = " {elapsed}<{remaining}" if _wide() else ""
        return _Line(
            position=2 * self.process_position,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format="{desc} {n_fmt}/{total_fmt}" + clock + "{postfix}",
        )


class _Line(Tqdm):
    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        if self.disable:
            return
        items = []
        for name, value in (ordered_dict or {}).items():
            items.append(f"{name}={value if isinstance(value, str) else self.format_num(value)}")
        self.postfix = " ".join(items)
        columns = self.ncols or sys.maxsize
        while items and len(self.format_meter(**self.format_dict | {"ncols": None})) > columns:
            items.pop()
            self.postfix = " ".join(items)
        if refresh:
            self.refresh()


class NarrowRich(RichProgressBar):
    """Rich puts metrics that do not fit into further lines."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return short(super().get_metrics(*args))

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        from lightning.pytorch.callbacks.progress import rich_progress

        wide = rich_progress.ProcessingSpeedColumn, rich_progress.CustomBarColumn
        columns = super().configure_columns(trainer)
        return [one for one in columns if not isinstance(one, wide[: 1 if _wide() else 2])]
