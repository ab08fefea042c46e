"""Averages of the ranks' parameters in Lightning's hooks, where ranks train with parameters of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging

from lightning_ring.comm.communicator import Communicator


class ShowAverages(pl.Callback):
    """The first of all callbacks: has averages in place before validations, and at the end of
    epochs and of the fit.

    They stay until the next training batch. Hooks of training batches see this rank's own
    parameters.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self.show = show

    def follow(self, trainer: pl.Trainer) -> None:
        self.leave(trainer)
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def leave(self, trainer: pl.Trainer) -> None:
        if self in (callbacks := trainer.callbacks):  # type: ignore[attr-defined]
            callbacks.remove(self)

    def on_validation_start(self, *_: Any) -> None:
        self.show()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.show()

    def on_train_end(self, *_: Any) -> None:
        self.show()


@torch.no_grad()
def average_weight_averages(trainer: pl.Trainer, comm: Communicator, device: torch.device) -> None:
    """Each rank's `WeightAveraging` follows that rank's own steps: have it be the average over the
    ranks. Collective.

    The averages over steps are linear, so that it is that of the ranks' average, and so it remains.
    """
    from lightning_ring.algorithms.local.averages import average_  # only some algorithms need it

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            params = [param.detach() for param in callback._average_model.module.parameters()]
            # a GPU's communicator moves nothing on the host
            moved = [param.to(device) for param in params]
            average_(moved, comm, "averages over steps")
            torch._foreach_copy_(params, moved)
