"""Takes back what a step changes besides gradients, before it is done again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_ring.host.random_state import remember_random_state


def remember_values(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keep values and storage of ``tensors``; the returned function restores both."""
    kept = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, data, values in kept:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data  # an assignment to `data` has put another tensor there
            tensor.data.copy_(values)

    return restore


def remember(module: nn.Module) -> Callable[[], None]:
    """Keep ``module``'s buffers and the random generators; the returned function restores both."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    restore_generators = remember_random_state()

    @torch.no_grad()
    def restore() -> None:
        for buffer, kept in buffers:
            buffer.copy_(kept)
        restore_generators()

    return restore


class StepUnderWay:
    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None

    def begin(self, undo: Callable[[], None]) -> None:
        """Start a step; ``undo`` is called once at most."""
        self._undo = undo

    def finish(self) -> None:
        self._undo = None

    def take_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
