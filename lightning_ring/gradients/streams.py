"""The order of a device's streams that fill and read one bucket. Nothing of this happens on the
CPU.

Autograd computes a gradient on the stream of its forward, and hooks run there: gradients of one
bucket may come from several streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def current_stream(device: torch.device) -> Any:
    """The current stream of ``device``; `None` on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def keep_for(stream: Any, tensor: Tensor) -> None:
    """Have the memory of ``tensor`` go to no other tensor before ``stream`` has read it."""
    tensor.record_stream(stream)


class Fillers:
    """The streams that have computed gradients of a bucket since it was last sent."""

    __slots__ = ("_device", "_has_streams", "_streams")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type != "cpu"
        self._streams: list[Any] = []

    def note(self) -> None:
        """A gradient has just been computed, on the current stream."""
        if not self._has_streams:
            return
        stream = current_stream(self._device)
        if stream not in self._streams:
            self._streams.append(stream)

    def join(self, grads: Iterable[Tensor | None]) -> None:
        """Have the current stream, which is about to read ``grads``, go on after all that
        computed them.
        """
        streams, self._streams = self._streams, []
        if not streams:
            return
        current = current_stream(self._device)
        others = [stream for stream in streams if stream != current]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for grad in grads:
                if grad is not None:
                    keep_for(current, grad)


def order_after_current(stream: Any, device: torch.device) -> None:
    """Have ``stream`` go on after what the current stream of ``device`` was given so far."""
    if device.type != "cpu" and stream != (current := current_stream(device)):
        stream.wait_stream(current)
