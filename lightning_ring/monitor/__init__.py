"""Callbacks that show what a run is doing."""

from lightning_ring.monitor.gap_meter import GapMeter
from lightning_ring.monitor.loop_monitor import LoopMonitor
from lightning_ring.monitor.profile import RingProfile
from lightning_ring.monitor.ring_monitor import RingMonitor
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.monitor.step_record import StepTimes
from lightning_ring.monitor.step_timer import StepTimer

__all__ = [
    "GapMeter",
    "LoopMonitor",
    "RingMonitor",
    "RingProfile",
    "RingReport",
    "StepTimer",
    "StepTimes",
]
