"""Small tables that the host makes and a device reads, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import is_gpu, send


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph records what ``device`` is told now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
            table = table.pin_memory() if is_gpu(device) else table
            sent = table.to(device, non_blocking=True)
            self._captured += (table, sent)
        else:
            sent = send(table, device)
            self._kept[key] = (content, sent)
        return sent
