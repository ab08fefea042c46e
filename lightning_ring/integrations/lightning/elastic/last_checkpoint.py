"""The checkpoint of a job that ends with too few ranks, and that with which a job goes on that
has lost its state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring.errors import StateLostError
from lightning_ring.integrations.lightning.checkpoints import count_trained_batches
from lightning_ring.job.exit import say
from lightning_ring.membership.endings import JobEnded

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.process import ElasticProcess
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


def save_last_checkpoint(strategy: ElasticStrategy, number: int) -> Path:
    """Save the fit beside its other checkpoints, as whichever rank calls it. All ranks that are
    left hold the same.
    """
    trainer = strategy.fit_trainer
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    path = (
        Path(folder or trainer.default_root_dir) / f"too-few-ranks-step={trainer.global_step}.ckpt"
    )
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    count_trained_batches(checkpoint, trainer)
    own = path.with_name(f"{path.name}.{number}")
    strategy.checkpoint_io.save_checkpoint(checkpoint, own)
    os.replace(own, path)
    return path


def save_at_the_end(
    strategy: ElasticStrategy, process: ElasticProcess, take_back: Callable[[], None]
) -> None:
    """Save what this rank has finished, where the job ends because it had too few ranks for too
    long.

    ``take_back`` undoes the step under way.
    """
    number = process.member.number
    sharded, view = strategy.algorithm.sharded, process.recovery.view
    if sharded and (view is None or not view.last):
        hint = where_to_go_on(strategy.fit_trainer)
        say(f"process {number} saves no checkpoint: it has a part of the optimizer's state. {hint}")
        return
    take_back()
    with strategy.whole_optimizer_states() if sharded else nullcontext():
        path = save_last_checkpoint(strategy, number)
    say(f"process {number} saved a checkpoint: go on from it with ckpt_path={str(path)!r}")


def lose_state(trainer: pl.Trainer, process: ElasticProcess, error: StateLostError) -> NoReturn:
    """End this rank, which cannot go on. The job begins again from the newest checkpoint, where
    there is one.

    Raises:
        JobEnded: With the reason, and what follows.
        StateLostError: There is no checkpoint, or it cannot be used.
    """
    view, hint = process.recovery.view, where_to_go_on(trainer)
    if view is not None and view.last:
        raise JobEnded(
            f"The job ends: {view.last}. No checkpoint could be saved: {error} {hint}"
        ) from error
    checkpoint = newest_checkpoint(trainer)
    # the fits before would get the checkpoint of this one
    if checkpoint is None or process.num_fits > 1:
        raise StateLostError(f"{error} {hint}") from None
    process.member.lose_state(
        str(error), os.path.abspath(checkpoint), os.stat(checkpoint).st_mtime_ns
    )
    raise JobEnded(f"The job begins again from {checkpoint}: {error}") from error


def newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """The newest file that the fit has saved and can go on from; else the one that it began
    with, if any.
    """
    callbacks = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    whole = [callback for callback in callbacks if not callback.save_weights_only]
    saved = [path for one in whole for path in (one.last_model_path, *one.best_k_models) if path]
    there = [path for path in saved if os.path.isfile(path)]
    if there:
        return max(there, key=os.path.getmtime)
    first = trainer.ckpt_path
    return str(first) if first and os.path.isfile(first) else None


def where_to_go_on(trainer: pl.Trainer) -> str:
    """A sentence for a job that has lost its state."""
    newest = newest_checkpoint(trainer)
    if newest is None:
        return "The fit has saved no checkpoint: start the job again."
    return (
        f"Start the job again from its newest checkpoint: trainer.fit(..., ckpt_path={newest!r})."
    )


def go_on_from(trainer: pl.Trainer, path: str) -> Callable[[], None]:
    """Let the fit that begins load the checkpoint at ``path``, whatever the script names.
    Returns what ends that.
    """
    connector = trainer._checkpoint_connector
    plain = connector.resume_start

    def resume(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        plain(path, weights_only=weights_only)

    connector.resume_start = resume  # type: ignore[method-assign]
    return lambda: vars(connector).pop("resume_start", None)
