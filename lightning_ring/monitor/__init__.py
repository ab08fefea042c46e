"""Callbacks that show what a run is doing."""

from lightning_ring.monitor.gap_meter import GapMeter
from lightning_ring.monitor.profile import RingProfile
from lightning_ring.monitor.step_timer import StepTimer, StepTimes
from lightning_ring.monitor.throughput import ThroughputMonitor

__all__ = ["GapMeter", "RingProfile", "StepTimer", "StepTimes", "ThroughputMonitor"]
