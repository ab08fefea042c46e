"""The times of a loop: its forwards, steps and collectives, as slices of a trace."""

from __future__ import annotations

import atexit
import time
from pathlib import Path
from typing import Any

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import Listener
from lightning_ring.comm.timing import now
from lightning_ring.host.accelerator import synchronize
from lightning_ring.timeline.recorder import FORWARD, OPTIMIZER, STEPS
from lightning_ring.timeline.session import Session, start_session


def open_timeline(
    path: Path | None,
    comm: Communicator | None,
    device: torch.device,
    listeners: list[Listener],
    about: dict[str, Any],
) -> LoopTimeline | None:
    if comm is not None:  # plain mpirun hands no RING_TIMELINE to other hosts
        path = comm.broadcast_object(path, name="timeline path")
    if path is None:
        return None
    session = start_session(path, comm, about=about, device=device)
    return LoopTimeline(session, device, listeners)


class LoopTimeline:
    """Records a loop from here to `finish`, which is collective.

    A step ends where an optimizer has stepped. The normal end of the script finishes a timeline.
    """

    def __init__(self, session: Session, device: torch.device, listeners: list[Listener]) -> None:
        self._session = session
        self._recorder = session.recorder
        self._listeners = listeners
        self._device = device
        self._listeners.append(self._recorder.collective)
        self._began = self.now()
        self._recorder.begin_step(0, time.perf_counter())
        atexit.register(self.finish)

    def now(self) -> Any:
        """A point in time: seconds, or on a GPU an event."""
        return now(self._device)

    def forward(self, began: Any, ended: Any) -> None:
        self._recorder.slice(FORWARD, "forward", began, ended, {"step": self._recorder.step})

    def optimizer_step(self, began: Any, ended: Any) -> None:
        step = self._recorder.step
        self._recorder.slice(OPTIMIZER, "optimizer step", began, ended, {"step": step})
        self._recorder.slice(STEPS, f"step {step}", self._began, ended, {"step": step})
        self._began = ended
        self._recorder.begin_step(step + 1, time.perf_counter())

    def finish(self) -> None:
        """End the recording; rank 0 merges. Twice is fine."""
        if self._detach():
            synchronize(self._device)
            self._session.finish()

    def abandon(self) -> None:
        """After an error: close this rank's file without the others."""
        if self._detach():
            self._session.close()

    def _detach(self) -> bool:
        atexit.unregister(self.finish)
        recording = self._recorder.collective in self._listeners
        if recording:
            self._listeners.remove(self._recorder.collective)
        return recording
