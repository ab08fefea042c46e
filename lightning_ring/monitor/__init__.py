"""Callbacks that show what a run is doing."""

from lightning_ring.monitor.terminal import widen_terminal
from lightning_ring.monitor.throughput import ThroughputMonitor

__all__ = ["ThroughputMonitor", "widen_terminal"]
