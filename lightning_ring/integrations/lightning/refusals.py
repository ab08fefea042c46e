"""Arguments of the Trainer and of the strategy that an algorithm cannot have beside it."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.ranks.loss_scaling import refuse_scaler


def check_algorithm(algorithm: Algorithm, trainer: pl.Trainer, timeline_switch: object | None) -> None:
    """``timeline_switch``: the signal or the file that switches the timeline, if any.

    Raises:
        ConfigurationError: ``algorithm`` cannot train with this loss scaler, this clipping or this timeline.
    """
    if algorithm.steps_alone:
        refuse_scaler(trainer.precision_plugin, type(algorithm).__name__)
    if trainer.gradient_clip_val and (why := algorithm.refusal_of_clipping()):
        raise ConfigurationError(f"Trainer got gradient_clip_val={trainer.gradient_clip_val}, but {why}")
    if not algorithm.steps_together and timeline_switch is not None:
        raise ConfigurationError(
            f"the timeline is to be switched by {timeline_switch}, at a step that all ranks take together, and under "
            f"{type(algorithm).__name__} each rank has steps of its own. Give timeline a path."
        )
