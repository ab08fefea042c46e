"""A device without one: CPU tensors whose values the host gets by copies that arrive when the
test says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from lightning_ring.comm import communicator, host_copy
from lightning_ring.gradients import delivery
from lightning_ring.gradients.compression import error_feedback


class FakeEvent:
    """After a copy. ``reached`` tells whether the device has come to it."""

    def __init__(self, reached: Callable[[], bool]) -> None:
        self._reached = reached

    def query(self) -> bool:
        return self._reached()

    def synchronize(self) -> None:
        raise AssertionError("the host waits inside the driver")


def on_fake_device(monkeypatch: pytest.MonkeyPatch, mark: Callable[[], Callable[[], bool]]) -> None:
    """Have all tensors lie on a device. ``mark`` is called for each copy, and returns whether it
    has arrived.
    """
    for module in (communicator, host_copy, delivery, error_feedback):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    monkeypatch.setattr(
        host_copy, "start_copy", lambda tensor: (_copied(tensor), FakeEvent(mark()))
    )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
