"""Data-loader workers ignore Slurm's signals, so that their rank can still train and save."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from torch.utils.data import DataLoader


def ignore_in_workers(loader: Any, signals: Sequence[signal.Signals], rank: int) -> None:
    """Have workers that ``loader`` starts from now on ignore ``signals``, unless their rank sends
    them.

    Slurm signals every process of a job. The end of a worker by a signal raises an error in its
    rank, which could then not reach the step at which all ranks save.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return
    _auto_add_worker_init_fn(loader, rank)  # Lightning adds it later, and only if there is none
    then = loader.worker_init_fn
    if not (isinstance(then, functools.partial) and then.func is _start_worker):
        loader.worker_init_fn = functools.partial(_start_worker, tuple(signals), then)


def _start_worker(
    signals: tuple[signal.Signals, ...], then: Callable[[int], None] | None, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(
        target=_wait_for_the_rank, args=(signals,), name="ring-worker-signals", daemon=True
    ).start()
    if then is not None:
        then(worker_id)


def _wait_for_the_rank(signals: tuple[signal.Signals, ...]) -> None:
    """End this worker when its own rank sends SIGTERM, as `DataLoader` and `multiprocessing` do."""
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
            os._exit(0)
