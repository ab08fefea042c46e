"""A device without one: CPU tensors whose values the host gets by copies that arrive when the
test says so.
"""

from lightning_ring.comm import communicator, host_copy
from lightning_ring.gradients import delivery
from lightning_ring.gradients.compression import error_feedback


class FakeEvent:
    """After a copy. ``reached`` tells whether the device has come to it."""

    def __init__(self, reached):
        self._reached = reached

    def query(self):
        return self._reached()

    def synchronize(self):
        raise AssertionError("the host waits inside the driver")


def on_fake_device(monkeypatch, mark):
    """Have all tensors lie on a device. ``mark`` is called for each copy, and returns whether it
    has arrived.
    """
    for module in (communicator, host_copy, delivery, error_feedback):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    monkeypatch.setattr(
        host_copy, "start_copy", lambda tensor: (_copied(tensor), FakeEvent(mark()))
    )


def _copied(tensor):
    return tensor.detach().clone()
