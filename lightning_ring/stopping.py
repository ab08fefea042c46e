"""Requests to stop: a signal becomes a flag, so that all ranks can stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

STOP_SIGNAL_VARIABLE = (
    "RING_STOP_SIGNAL"  # our launchers give a signal's number here: mpirun forwards it, instead of killing
)


def on_stop_signal(ask_to_stop: Callable[[], None]) -> None:
    """Call ``ask_to_stop`` on SIGTERM and on the launcher's signal; outside the main thread do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        ask_to_stop()

    for signum in stop_signals():
        signal.signal(signum, handler)


def stop_signals() -> list[signal.Signals]:
    named = os.environ.get(STOP_SIGNAL_VARIABLE)
    return [signal.SIGTERM] + ([signal.Signals(int(named))] if named else [])


def leave_sigterm_to_the_buckets(trainer: pl.Trainer) -> None:
    """Have the Trainer ask nobody whether rank 0 got a SIGTERM: the buckets carry that already.

    Before every batch Lightning broadcasts it in torch's default group, and reads the answer off the device. And of
    ranks that take different numbers of steps one would wait in that group and one in the communicator, for ever, where
    the communicator alone sees the error.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    return None
