"""Callbacks that show what a run is doing.

A timer stands before the Trainer's profiler and reads the clock (on CUDA it records an event) at
Lightning's announcements. The recorded communicator tells when each collective was called, waited
for and over. Both are kept until a step is logged. The time lost to collectives is then taken out
of the phase in which it was lost, so that the parts add up to the step. Each rank puts its row of
numbers into one all-gather through the same communicator, in ``on_train_batch_end``; it is read a
step later, without waiting. All ranks end a step together, so the slowest rank is the one with the
longest step *without* waiting.

A monitor never ends a training. A number that fails is left out and reported once. Errors of
communication and of the user's loggers are raised.
"""

from lightning_ring.monitor.gap_meter import GapMeter
from lightning_ring.monitor.profile import RingProfile
from lightning_ring.monitor.ring_monitor import RingMonitor
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.monitor.step_times import StepTimer, StepTimes

__all__ = [
    "GapMeter",
    "RingMonitor",
    "RingProfile",
    "RingReport",
    "StepTimer",
    "StepTimes",
]
