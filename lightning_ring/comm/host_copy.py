"""Copies of a device's tensors on the host, waited for with the patience of the collectives
before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WaitUntil = Callable[[Callable[[], bool]], None]


class HostCopy:
    """A copy of ``tensor``, which may be overwritten at once. On a device the copy is queued behind
    what computes it.

    ``wait_until`` is `Communicator.wait_until`; without one the driver waits.
    """

    __slots__ = ("_copied", "_value", "_wait_until")

    def __init__(self, tensor: Tensor, wait_until: WaitUntil | None = None) -> None:
        self._wait_until = wait_until
        if on_host(tensor):
            self._value, self._copied = tensor.detach().clone(), None
        else:
            self._value, self._copied = start_copy(tensor.detach())

    @property
    def immediate(self) -> bool:
        """Whether `value` never has to wait."""
        return self._copied is None

    def ready(self) -> bool:
        """Whether `value` would return at once."""
        return self._copied is None or bool(self._copied.query())

    def value(self) -> Tensor:
        """On the host. Raises `RingError`: a rank failed, or a collective before it is too late."""
        if self._copied is not None and not self._copied.query():
            if self._wait_until is None:
                self._copied.synchronize()
            else:
                self._wait_until(self._copied.query)
        return self._value


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def start_copy(tensor: Tensor) -> tuple[Tensor, Any]:
    """The copy in page-locked memory, and the event after which it is valid."""
    value = tensor.to("cpu", non_blocking=True)
    event = torch.Event(tensor.device.type)
    event.record(torch.accelerator.current_stream(tensor.device))
    return value, event
