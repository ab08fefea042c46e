"""The recipe of the digits, for benchmarks that train it under their own strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from hydra import compose, initialize
from hydra.utils import instantiate
from lightning.pytorch.strategies import Strategy


def digits(
    strategy: Strategy,
    seed: int,
    overrides: Sequence[str] = (),
    callbacks: Sequence[L.Callback] = (),
) -> tuple[L.Trainer, Any, Any]:
    """Trainer, model and data of ``recipes/train.py experiment=digits``, without validation and
    checkpoints.

    ``overrides`` change the recipe's configuration, such as ``"optimizer.momentum=0"``.
    """
    with initialize(version_base="1.3", config_path="../../configs"):
        config = compose("train", overrides=["experiment=digits", f"seed={seed}", *overrides])
    L.seed_everything(seed, workers=True, verbose=False)
    model = instantiate(
        config.model, optimizer=instantiate(config.optimizer), schedule=instantiate(config.schedule)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=config.trainer.max_epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    return trainer, model, instantiate(config.data)
