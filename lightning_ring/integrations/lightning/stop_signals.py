"""Requests to stop: a signal becomes a flag, so that all ranks can act on it at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

STOP_SIGNAL_VARIABLE = (
    "RING_STOP_SIGNAL"  # our launchers give a signal's number here: mpirun forwards it, instead of killing
)


class Request(IntEnum):
    """What this rank was asked for. Of several ranks' requests the highest counts."""

    NONE = 0
    REQUEUE = 1
    STOP = 2


def on_stop_signal(ask_to_stop: Callable[[], None]) -> None:
    """Call ``ask_to_stop`` on SIGTERM and on the launcher's signal; outside the main thread do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        ask_to_stop()

    for signum in stop_signals():
        signal.signal(signum, handler)


def on_requeue_signal(signum: signal.Signals, ask_to_requeue: Callable[[], None]) -> None:
    """Call ``ask_to_requeue`` on ``signum``, unless it has a handler or stops the job; as Lightning does."""
    here = threading.current_thread() is threading.main_thread()
    if here and signum not in stop_signals() and signal.getsignal(signum) == signal.SIG_DFL:
        signal.signal(signum, lambda number, frame: ask_to_requeue())


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
