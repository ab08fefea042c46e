"""Modules of the other package: ``pytorch_lightning`` has classes and a registry of its own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from lightning.pytorch.trainer import trainer as trainer_module

from lightning_ring.errors import ConfigurationError

_ADVICE = (
    "lightning_ring works with the package `lightning`: write `import lightning as L` or "
    "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, everywhere."
)


def foreign_trainer_error() -> ConfigurationError:
    """For the Trainer of the other package."""
    return ConfigurationError(f"Trainer(strategy='ring') of pytorch_lightning was called. {_ADVICE}")


def explain_foreign_modules() -> None:
    """Replace Lightning's "`model` must be a `LightningModule`, got `MyLightningModule`" by an error that says why.

    Lightning checks a module's type before it asks the strategy anything, so the check itself is wrapped.
    """
    original = getattr(trainer_module, "_maybe_unwrap_optimized", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def checked(model: object) -> Any:
        foreign = sys.modules.get("pytorch_lightning")
        if foreign is not None and isinstance(model, foreign.LightningModule):
            raise ConfigurationError(f"{type(model).__qualname__} is a pytorch_lightning module. {_ADVICE}")
        return original(model)

    trainer_module._maybe_unwrap_optimized = checked
