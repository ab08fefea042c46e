"""Timeouts, and Horovod's variables: HOROVOD_CPU_OPERATIONS and HOROVOD_START_TIMEOUT."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.exit import end_process, say

_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
_START = "HOROVOD_START_TIMEOUT"
TIMEOUT = timedelta(hours=12)  # Horovod waits for ever; a rank that died ends the wait at once
STALL_WARNING = timedelta(seconds=60)


def cpu_backend() -> str:
    """The backend of CPU tensors; shared memory within a node by default.

    Raises:
        ConfigurationError: The variable names another library.
    """
    text = os.environ.get(_OPERATIONS, "")
    if text.lower() not in ("", "gloo", "mpi"):
        raise ConfigurationError(
            f"{_OPERATIONS}={text!r}: expected GLOO or MPI. Leave it out for shared memory within "
            "a node, and the better of the two between nodes."
        )
    return text.lower() or "auto"


@contextmanager
def within_start_timeout() -> Iterator[None]:
    """End this process, and so the job, if the block takes longer than the variable's seconds.

    Raises:
        ConfigurationError: The variable is not a number above 0.
    """
    text = os.environ.get(_START)
    if not text:
        yield
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigurationError(
            f"{_START}={text!r}: expected a number of seconds above 0, such as 30."
        )

    def give_up() -> None:
        say(
            f"hvd.init() has waited {seconds:g} s for the other ranks ({_START}, "
            "--start-timeout): this process ends"
        )
        end_process(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
