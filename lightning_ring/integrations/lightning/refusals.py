"""Arguments of the Trainer and of the strategy that an algorithm cannot have beside it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.ranks.loss_scaling import refuse_scaler


def check_algorithm(
    algorithm: Algorithm, trainer: pl.Trainer, timeline_switch: object | None
) -> None:
    """``timeline_switch``: the signal or the file that switches the timeline, if any.

    Raises:
        ConfigurationError: ``algorithm`` cannot train with this loss scaler, this clipping or this
            timeline.
    """
    if algorithm.steps_alone:
        refuse_scaler(trainer.precision_plugin, type(algorithm).__name__)
    if trainer.gradient_clip_val and (why := algorithm.refuses_clipping):
        raise ConfigurationError(
            f"Trainer got gradient_clip_val={trainer.gradient_clip_val}, but {why}"
        )
    if not algorithm.steps_together and timeline_switch is not None:
        raise ConfigurationError(
            f"the timeline is to be switched by {timeline_switch}, at a step that all ranks take "
            f"together, and under {type(algorithm).__name__} each rank has steps of its own. Give "
            "timeline a path."
        )


def refuse_clipping(plugin: Precision, algorithm: Algorithm) -> None:
    """Until `allow_clipping`: `self.clip_gradients` of a module raises, if ``algorithm`` cannot
    have that.
    """
    clip, why = plugin.clip_gradients, algorithm.refuses_clipping
    if not why:
        return

    def refuse(optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        if clip_val > 0:
            raise ConfigurationError(f"gradients were about to be clipped at {clip_val}, but {why}")
        clip(optimizer, clip_val, *args, **kwargs)

    plugin.clip_gradients = refuse  # type: ignore[method-assign]


def allow_clipping(plugin: Precision) -> None:
    vars(plugin).pop("clip_gradients", None)
