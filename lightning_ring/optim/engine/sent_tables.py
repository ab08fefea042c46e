"""Small tables that the host makes and a device reads, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GPUS = ("cuda", "xpu")  # NVIDIA's and AMD's, and Intel's


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` (on the CPU, or there already) on ``device``, without waiting for the device."""
    if device.type in GPUS and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph records what ``device`` is told now."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


class SentTables:
    """Tables that are sent once and kept, and what CUDA graphs need of them.

    A replay reads the memory that its capture saw. A table that a capture has used is therefore
    held for good, and never written again. The copy of a table that a capture made runs at replays
    only: eager steps make their own.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, Tensor]] = {}
        self._captured: list[Tensor] = []

    def get(
        self, key: Any, content: Any, device: torch.device, make: Callable[[], Tensor]
    ) -> Tensor:
        """``make()`` on ``device``, or the table of the last call with this ``key`` if its
        ``content`` was equal.
        """
        kept = self._kept.get(key)
        capturing = captured(device)
        if kept is not None and kept[0] == content:
            if capturing:
                self._captured.append(kept[1])
            return kept[1]
        table = make()
        if capturing:
            table = table.pin_memory() if device.type in GPUS else table
            sent = table.to(device, non_blocking=True)
            self._captured += (table, sent)
        else:
            sent = send(table, device)
            self._kept[key] = (content, sent)
        return sent
