"""Callbacks that show what a run is doing."""

from lightning_ring.monitor.gap_meter import GapMeter
from lightning_ring.monitor.profile import RingProfile
from lightning_ring.monitor.ring_monitor import LoopMonitor, RingMonitor
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.monitor.step_times import StepTimer, StepTimes

__all__ = [
    "GapMeter",
    "LoopMonitor",
    "RingMonitor",
    "RingProfile",
    "RingReport",
    "StepTimer",
    "StepTimes",
]
