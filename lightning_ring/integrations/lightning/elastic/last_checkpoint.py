"""The checkpoint of a job that ends with too few ranks, and that with which a job goes on that
has lost its state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import StateLostError
from lightning_ring.integrations.lightning.checkpoints import count_trained_batches
from lightning_ring.job.exit import say
from lightning_ring.membership.endings import JobEnded

MOST_ENTRIES = 3  # from one checkpoint: the fit does not get beyond it

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
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
    strategy: ElasticStrategy, fit: ElasticFit, take_back: Callable[[], None]
) -> None:
    """Save what this rank has finished, where the job ends because it had too few ranks for too
    long.

    ``take_back`` undoes the step under way.
    """
    number = fit.process.member.number
    sharded, view = strategy.algorithm.sharded, fit.recovery.view
    if sharded and (view is None or not view.last):
        hint = where_to_go_on(newest_checkpoint(strategy.fit_trainer, fit.given))
        say(f"process {number} saves no checkpoint: it has a part of the optimizer's state. {hint}")
        return
    take_back()
    with strategy.whole_optimizer_states() if sharded else nullcontext():
        path = save_last_checkpoint(strategy, number)
    say(f"process {number} saved a checkpoint: go on from it with ckpt_path={str(path)!r}")


def newest_of_rank_zero(
    strategy: ElasticStrategy, fit: ElasticFit, error: StateLostError, comm: Communicator
) -> str:
    """The newest checkpoint, as rank 0 finds it, after a shard of the state was lost. Collective.

    Raises:
        JobEnded: The job ends with this view anyway.
        StateLostError: There is no checkpoint, or the fit does not get beyond it.
    """
    trainer, view = strategy.fit_trainer, fit.recovery.view
    path = newest_checkpoint(trainer, fit.given)
    version = os.stat(path).st_mtime_ns if path is not None else 0
    path, version, hint = comm.broadcast_object((path, version, where_to_go_on(path)))
    if view is not None and view.last:
        raise JobEnded(
            f"The job ends: {view.last}. No checkpoint could be saved: {error} {hint}"
        ) from error
    if path is None:
        raise StateLostError(f"{error} {hint}") from None
    if fit.process.count_entries(path, version) > MOST_ENTRIES:
        raise StateLostError(
            f"{error} All ranks have gone on {MOST_ENTRIES} times from {path}, and lost their "
            "state before the next checkpoint."
        ) from None
    if comm.rank == 0:
        say(f"{error} All ranks go on from {path}")
    return path


def newest_checkpoint(trainer: pl.Trainer, given: Any) -> str | None:
    """The newest file that the fit has saved and can go on from; else ``given``, with which it
    began, if that is a file.
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
    return str(given) if given and os.path.isfile(given) else None


def where_to_go_on(newest: str | None) -> str:
    """A sentence for a job that has lost its state."""
    if newest is None:
        return "The fit has saved no checkpoint: start the job again."
    return (
        f"Start the job again from its newest checkpoint: trainer.fit(..., ckpt_path={newest!r})."
    )
