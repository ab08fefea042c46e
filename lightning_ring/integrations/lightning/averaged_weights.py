"""Averages of the ranks' parameters in Lightning's hooks, where ranks train with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class ShowAverages(pl.Callback):
    """The first of all callbacks: has averages in place before validations, and at the end of epochs and of the fit.

    They stay until the next training batch. Hooks of training batches see this rank's own parameters.
    """

    reads_parameters = False

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
