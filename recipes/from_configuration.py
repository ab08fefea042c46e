"""What all models of the recipes share: an optimizer with a schedule, and checkpoints that can be
loaded without anything else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.schedules import WarmupLR

Schedule = Callable[[int], float]


class FromConfiguration(L.LightningModule):
    """A module whose checkpoints hold the configuration that it was made from, as hyper-parameters.

    ``load_from_checkpoint(FILE)`` makes it again, without further arguments; `recipes/identify.py`
    does so.

    Args:
        optimizer: Called with parameter groups, in which biases and normalization layers have no
            weight decay.
        schedule: Called with ``total``, the number of optimizer steps of the whole run; gives a
            function from step to factor, as `of_run` does. None keeps the learning rate constant.
    """

    def __init__(
        self, optimizer: partial[Optimizer], schedule: Callable[..., Schedule] | None
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.schedule = schedule

    def configure_optimizers(self) -> OptimizerLRScheduler:
        weight_decay = self.optimizer.keywords.get("weight_decay", 0.0)
        optimizer = self.optimizer(exclude_bias_and_norm(self, weight_decay))
        if self.schedule is None:
            return optimizer
        factor = self.schedule(total=int(self.trainer.estimated_stepping_batches))
        scheduler = WarmupLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def keep_configuration(self, config: DictConfig) -> None:
        """Save ``model``, ``optimizer`` and ``schedule`` of the ``config`` that made this."""
        parts: dict[str, Any] = {
            name: OmegaConf.to_container(config[name], resolve=True)
            for name in ("model", "optimizer", "schedule")
            if config[name] is not None
        }
        self.hparams.update(parts.pop("model"), **parts)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **changes: Any) -> Any:  # type: ignore[override]
        """As Lightning's; parts that are not among ``changes`` are made from the checkpoint's
        configuration.

        A configuration names code that is run: use only checkpoints that you trust.
        """
        saved = torch.load(
            checkpoint_path, map_location="cpu", weights_only=changes.get("weights_only")
        )
        parts = {
            name: instantiate(value)
            for name, value in saved.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).items()
            if isinstance(value, dict) and name not in changes
        }
        return super().load_from_checkpoint(checkpoint_path, **parts, **changes)


def of_run(
    total: int,
    schedule: Callable[..., Schedule],
    epochs: float,
    warmup: float = 0,
    warmup_epochs: float | None = None,
    milestone_epochs: Sequence[float] | None = None,
    **settings: Any,
) -> Schedule:
    """``schedule``, one of `lightning_ring.schedules` with ``settings``, for a run of ``total``
    optimizer steps in ``epochs``.

    ``warmup`` is in steps; ``warmup_epochs``, if given, takes its place. ``milestone_epochs`` are
    for `warmup_multistep`.

    Raises:
        ConfigurationError: The warm-up is not shorter than the run.
    """
    steps_per_epoch = total / epochs
    given = f"schedule.warmup={warmup}"
    if warmup_epochs is not None:
        given = f"schedule.warmup_epochs={warmup_epochs}"
        warmup = warmup_epochs * steps_per_epoch
    if warmup >= total:
        raise ConfigurationError(
            f"{given} is a warm-up of {warmup:g} optimizer steps, but the whole run has {total} "
            f"(trainer.max_epochs={epochs}). Set schedule.warmup_epochs below {epochs}, raise "
            "trainer.max_epochs, or lower data.batch_size."
        )
    if milestone_epochs is not None:
        return schedule([epoch * steps_per_epoch for epoch in milestone_epochs], warmup, **settings)
    return schedule(total, warmup, **settings)
