"""A checkpoint of one rank that is left, where the others are gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring.integrations.lightning.checkpoints import count_trained_batches

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


def save_last_checkpoint(strategy: ElasticStrategy, number: int) -> Path:
    """Save the fit beside its other checkpoints, as whichever rank calls it. All ranks that are left hold the same."""
    trainer = strategy.fit_trainer
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    path = Path(folder or trainer.default_root_dir) / f"too-few-ranks-step={trainer.global_step}.ckpt"
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    count_trained_batches(checkpoint, trainer)
    own = path.with_name(f"{path.name}.{number}")
    strategy.checkpoint_io.save_checkpoint(checkpoint, own)
    os.replace(own, path)
    return path


def where_to_go_on(trainer: pl.Trainer) -> str:
    """A sentence for a job that has lost its state: the newest checkpoint that the fit has saved, if any."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    saved = [path for one in callbacks for path in (one.last_model_path, *one.best_k_models) if path]
    there = [path for path in saved if os.path.exists(path)]
    if not there:
        return "The fit has saved no checkpoint: start the job again."
    newest = max(there, key=os.path.getmtime)
    return f"Start the job again from its newest checkpoint: trainer.fit(..., ckpt_path={newest!r})."
