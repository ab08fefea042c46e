"""Checkpoints that hold the configuration of their model, and can be loaded without anything
else.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf


class FromConfiguration(L.LightningModule):
    """A module whose checkpoints hold the configuration that it was made from, as hyper-parameters.

    ``load_from_checkpoint(FILE)`` makes it again, without further arguments; `recipes/identify.py`
    does so.
    """

    def keep_configuration(self, config: DictConfig) -> None:
        """Save the parts ``model``, ``optimizer`` and ``schedule`` of ``config``, which made
        this module.
        """
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
