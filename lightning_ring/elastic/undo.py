"""Takes back what a step changes besides gradients, before it is done again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightning_ring.host.random_state import remember_random_state


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
