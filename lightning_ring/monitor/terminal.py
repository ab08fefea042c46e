"""Progress under mpirun, and where output is no terminal."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)

_OF_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


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
            for name, value in trainer.progress_bar_metrics.items():
                text = f"{value:.4g}" if isinstance(value, float) else value
                shown.append(f"{name} {text}")
            self.print(", ".join(shown), flush=True)
