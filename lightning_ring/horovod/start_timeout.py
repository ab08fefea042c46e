"""HOROVOD_START_TIMEOUT: how long ranks may take to meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.exit import end_process, say

_VARIABLE = "HOROVOD_START_TIMEOUT"


@contextmanager
def within_start_timeout() -> Iterator[None]:
    """End this process, and with it the job, where the block takes longer than the variable's
    seconds; without it ranks wait as long as `init` does.

    Raises:
        ConfigurationError: The variable is not a number above 0.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        yield
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigurationError(
            f"{_VARIABLE}={text!r}: expected a number of seconds above 0, such as 30."
        )

    def give_up() -> None:
        say(
            f"hvd.init() has waited {seconds:g} s for the other ranks ({_VARIABLE}, "
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
