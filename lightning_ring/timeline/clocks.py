"""Differences between the ranks' clocks, and a GPU's events on the host's clock.

No rank leaves a barrier before all have arrived. If rank i arrives at ``T_i`` and rank j leaves at
``R_j``, each by its own clock, then ``T_j - R_i <= offset_j - offset_i <= R_j - T_i``: each barrier
bounds every pair of clocks from both sides, as a ping-pong does in Cristian's algorithm (1989) and
in NTP. The tightest bounds of many barriers are kept; their middle is the estimate and half their
distance its error.

Ranks that read one clock (the same boot of the same kernel) differ by exactly 0.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_ring.host.accelerator import gpu_module, timed_event

if TYPE_CHECKING:
    from lightning_ring.comm.communicator import Communicator

ROUNDS = 40
# of one rank, by its own clock: when it came to each barrier, and left
Times = tuple[list[float], list[float]]


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A rank's clock beside rank 0's."""

    offset: float  # this clock minus rank 0's, in seconds
    error: float  # the offset is wrong by at most this many seconds
    at: float  # when it was measured, by this clock
    shared: bool  # it is rank 0's clock


def clock_identity() -> str:
    """Equal on ranks whose `time.perf_counter` reads one clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def read_clocks(
    comm: Communicator,
    *,
    clock: Callable[[], float] = time.perf_counter,
    identity: Callable[[], str] = clock_identity,
) -> list[ClockReading]:
    """Every rank's clock beside rank 0's, the same on every rank. Collective: 40 barriers, 1 if
    there is one clock.
    """
    names: list[str] = comm.all_gather_object(identity(), name="timeline: clocks")
    came: list[float] = []
    left: list[float] = []
    for _ in range(ROUNDS if len(set(names)) > 1 else 1):
        came.append(clock())
        comm.barrier(name="timeline: clocks")
        left.append(clock())
    times: list[Times] = comm.all_gather_object((came, left), name="timeline: times")
    readings = []
    for rank, name in enumerate(names):
        # of ranks that read one clock, the first stands for all
        (zeros, zero_left), (own, own_left) = times[0], times[names.index(name)]
        most = min(end - begin for begin, end in zip(zeros, own_left, strict=True))
        least = max(begin - end for begin, end in zip(own, zero_left, strict=True))
        shared = name == names[0]
        offset, error = (0.0, 0.0) if shared else ((most + least) / 2, abs(most - least) / 2)
        readings.append(ClockReading(offset, error, at=times[rank][1][-1], shared=shared))
    return readings


_RENEW_SECONDS = 10.0  # elapsed_time is a float32 of milliseconds: 1 µs of 10 s


class DeviceClock:
    """From events on ``device`` to seconds of `time.perf_counter`; only the constructor waits
    for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._reference = timed_event(device)
        gpu_module(device).synchronize(device)
        self._reference.record(gpu_module(device).current_stream(device))
        self._reference.synchronize()
        self._seconds = time.perf_counter()

    def __call__(self, event: Any) -> float | None:
        """`None` while the device has not come to ``event``."""
        if not event.query():
            return None
        seconds = self._seconds + self._reference.elapsed_time(event) / 1e3
        if seconds - self._seconds > _RENEW_SECONDS:
            self._reference, self._seconds = event, seconds
        return seconds
