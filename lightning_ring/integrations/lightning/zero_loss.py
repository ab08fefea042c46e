"""A zero loss for a rank without a loss: `training_step` returned `None`, or the rank ran out of
data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_ring.algorithms.algorithm import Algorithm

log = logging.getLogger(__name__)


class ZeroLoss:
    """A loss that depends on no parameter, so that its backward takes part in the reduction with
    zeros.
    """

    def __init__(self) -> None:
        self.in_use = False  # whether the current training step has one
        self._repeated_loss: Tensor | None = None

    def new(self, output: Any, device: torch.device, *, has_data: bool, rank: int) -> Tensor:
        """A zero loss for the current step, whose ``output`` is `None` or comes from a repeated
        batch.
        """
        if has_data:
            _warn_of_none(rank)
        self._repeated_loss = None if has_data else _loss_of(output)
        self.in_use = True
        return torch.zeros((), device=device, requires_grad=True)

    def repeat_backward(self, algorithm: Algorithm) -> None:
        """On a rank without data: run the backward of the repeated batch with zero gradients.

        Collectives inside backward (`all_gather` with gradients, SyncBatchNorm) need all ranks.
        """
        loss, self._repeated_loss = self._repeated_loss, None
        if loss is not None and loss.requires_grad:
            with algorithm.backwards.discarding():
                loss.backward(torch.zeros_like(loss))


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


@cache
def _warn_of_none(rank: int) -> None:
    log.warning(
        "lightning_ring: training_step returned None on rank %d: for that step its gradient "
        "counts as zero, and the average still divides by all ranks.",
        rank,
    )
