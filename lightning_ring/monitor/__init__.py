"""Callbacks that show what a run is doing."""

from lightning_ring.monitor.throughput import ThroughputMonitor

__all__ = ["ThroughputMonitor"]
