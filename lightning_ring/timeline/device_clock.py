"""CUDA events on the host's clock."""

from __future__ import annotations

import time

import torch

_RENEW_SECONDS = 10.0  # elapsed_time is a float32 of milliseconds: 1 µs of 10 s


class DeviceClock:
    """From events on ``device`` to seconds of `time.perf_counter`.

    The device is waited for once, when this is made. Later events are measured from one that is some 10 s older.
    """

    def __init__(self, device: torch.device) -> None:
        self._reference = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        self._reference.record(torch.cuda.current_stream(device))
        self._reference.synchronize()
        self._seconds = time.perf_counter()

    def __call__(self, event: torch.cuda.Event) -> float | None:
        """`None` while the device has not come to ``event``."""
        if not event.query():
            return None
        seconds = self._seconds + self._reference.elapsed_time(event) / 1e3
        if seconds - self._seconds > _RENEW_SECONDS:
            self._reference, self._seconds = event, seconds
        return seconds
