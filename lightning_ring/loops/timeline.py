"""The times of a loop: its forwards, steps and collectives, as slices of a trace."""

from __future__ import annotations

import atexit
import time
from typing import Any

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import Listener
from lightning_ring.comm.timing import now
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.timeline.clocks import DeviceClock
from lightning_ring.timeline.recorder import FORWARD, OPTIMIZER, STEPS
from lightning_ring.timeline.session import Session, start_session
from lightning_ring.timeline.settings import TimelineSettings


class LoopTimeline:
    """Records a loop from here to `finish`, if ``settings`` name a path. Both are collective.

    A loop announces no batch: a step ends where an optimizer has stepped. Nor does it always
    announce its end: the normal end of the script finishes a timeline.
    """

    def __init__(
        self,
        settings: TimelineSettings,
        comm: Communicator | None,
        device: torch.device,
        listeners: list[Listener],
        about: dict[str, Any],
    ) -> None:
        self._session: Session | None = None
        self._listeners = listeners
        self._device = device
        if comm is not None:  # plain mpirun hands no RING_TIMELINE to other hosts
            settings = comm.broadcast_object(settings, name="timeline settings")
        if settings.path is None:
            return
        clock = DeviceClock(device) if is_gpu(device) else None
        max_bytes = int(settings.max_mb * 2**20)
        self._session = start_session(
            settings.path, comm, max_bytes=max_bytes, about=about, seconds_of=clock
        )
        self._listeners.append(self._session.recorder.collective)
        self._began = self.now()
        atexit.register(self.finish)
        self._session.recorder.begin_step(0, time.perf_counter())

    @property
    def recording(self) -> bool:
        return self._session is not None

    def now(self) -> Any:
        """A point in time: seconds, or on a GPU an event."""
        return now(self._device) if self.recording else time.perf_counter()

    def forward(self, began: Any, ended: Any) -> None:
        self._slice(FORWARD, "forward", began, ended)

    def optimizer_step(self, began: Any, ended: Any) -> None:
        self._slice(OPTIMIZER, "optimizer step", began, ended)
        if self._session is None:
            return
        recorder = self._session.recorder
        recorder.slice(STEPS, f"step {recorder.step}", self._began, ended, {"step": recorder.step})
        self._began = ended
        recorder.begin_step(recorder.step + 1, time.perf_counter())

    def finish(self) -> None:
        """End the recording; rank 0 merges."""
        session = self._detach()
        if session is not None:
            if is_gpu(self._device):
                # what it has not come to would be left out
                gpu_module(self._device).synchronize(self._device)
            session.finish()

    def abandon(self) -> None:
        """After an error: close this rank's file, ask nobody."""
        session = self._detach()
        if session is not None:
            session.close()

    def _detach(self) -> Session | None:
        session, self._session = self._session, None
        if session is not None:
            atexit.unregister(self.finish)
            self._listeners.remove(session.recorder.collective)
        return session

    def _slice(self, track: int, name: str, began: Any, ended: Any) -> None:
        if self._session is not None:
            self._session.recorder.slice(
                track, name, began, ended, {"step": self._session.recorder.step}
            )
