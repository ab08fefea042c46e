"""What an elastic fit changes in Lightning's loops and loaders while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sized
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ring.data.sampling.sampler import ShuffledSampler
from lightning_ring.integrations.lightning.elastic.undo import (
    remember_callbacks,
    remember_exchanged_weights,
    remember_metrics,
)

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


def warn_of_fixed_samplers(loaders: Iterable[Any], rank: int, world_size: int) -> None:
    """Warn of validation loaders that were cut for other ranks, and so miss or repeat samples."""
    for number, loader in enumerate(loaders):
        sampler = getattr(loader, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or (sampler.rank, sampler.num_replicas) == (
            rank,
            world_size,
        ):
            continue
        warnings.warn(
            f"lightning_ring: ranks have changed, and validation loader {number} of rank {rank} "
            f"of {world_size} goes on with its DistributedSampler of rank {sampler.rank} of "
            f"{sampler.num_replicas}: validations leave samples out or count them twice. Give the "
            "loader no DistributedSampler (Lightning puts one in, for the ranks that there are), "
            "or make it in val_dataloader(), which is called again.",
            stacklevel=2,
        )


def with_ordered_sampler(loader: Any) -> Any:
    """``loader``, with a `ShuffledSampler` in place of torch's `DistributedSampler`.

    torch's cuts an epoch for a fixed number of ranks.
    """
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is not DistributedSampler or not isinstance(loader, DataLoader):
        return loader
    own = ShuffledSampler(
        len(cast(Sized, sampler.dataset)),
        shuffle=sampler.shuffle,
        remainder="drop" if sampler.drop_last else "repeat",
        seed=sampler.seed,
    )
    rank_zero_info(
        "lightning_ring: the training loader's DistributedSampler is replaced by "
        "lightning_ring.data.ShuffledSampler, whose order does not depend on the number of ranks."
    )
    return _update_dataloader(loader, own, mode=RunningStage.TRAINING)


def change_loops(strategy: ElasticStrategy, fit: ElasticFit, in_fit: ExitStack) -> None:
    """Let batches, validations and the optimizer's closure outlive deaths.

    ``in_fit`` takes back what is changed.
    """
    trainer = strategy.fit_trainer
    loop, plugin = trainer.fit_loop.epoch_loop, strategy.precision_plugin
    advance, validate, after_closure = loop.advance, loop.val_loop.run, plugin._after_closure
    in_fit.callback(vars(loop).pop, "advance", None)
    in_fit.callback(vars(loop.val_loop).pop, "run", None)
    in_fit.callback(vars(plugin).pop, "_after_closure", None)

    def advance_with_all_ranks(data_fetcher: Any) -> None:
        _meet(fit)
        if fit.enters_between_batches:
            # else Lightning would skip or repeat the last validation
            loop.restarting = fit.enters_between_batches = False
        advance(data_fetcher)

    def agree_after_closure(*args: Any) -> None:
        if not fit.step.committing:
            after_closure(*args)
            fit.step.averages_are_complete()
        fit.step.before_update()

    # ranks gather optimizer state before saving; a newcomer has no shards yet
    if fit.recovery.parted:
        save = trainer.save_checkpoint
        in_fit.callback(vars(trainer).pop, "save_checkpoint", None)
        trainer.save_checkpoint = (  # type: ignore[method-assign]
            lambda *args, **kwargs: strategy.call_together(lambda: save(*args, **kwargs))
        )
    loop.advance = advance_with_all_ranks  # type: ignore[method-assign]
    loop.val_loop.run = lambda: _validate(strategy, fit, validate)  # type: ignore[method-assign]
    if strategy.is_automatic:
        plugin._after_closure = agree_after_closure  # type: ignore[method-assign, assignment]


def _meet(fit: ElasticFit) -> None:
    if fit.waits_to_join:
        fit.join()
    elif fit.recovery.newcomers_wait:
        fit.let_in_newcomers()
    fit.step.place_epoch()


def _validate(strategy: ElasticStrategy, fit: ElasticFit, run: Callable[[], Any]) -> Any:
    """A validation, repeated when a rank dies in it."""
    trainer, module = strategy.fit_trainer, strategy.lightning_module
    if not strategy.is_survivable or module is None:
        return run()
    loop = trainer.fit_loop.epoch_loop.val_loop
    restore_metrics, restore_callbacks = remember_metrics(module), remember_callbacks(trainer)
    restore_weights = remember_exchanged_weights(trainer, module)
    modes = [(part, part.training) for part in module.modules()]
    should_stop = trainer.should_stop

    def take_back() -> None:
        restore_metrics()
        restore_callbacks()
        restore_weights()
        trainer.should_stop = should_stop
        # else the second run leaves it in eval mode
        for part, training in modes:
            part.training = training
        loop._restarting, loop._combined_loader = False, None
        trainer.validating = True

    result = fit.calls.call(lambda: strategy.and_barrier(run), take_back)
    if (
        loop._combined_loader is not None
        and fit.recovery.view is not None
        and fit.recovery.view.generation > 0
    ):
        warn_of_fixed_samplers(
            loop._combined_loader.flattened, strategy.global_rank, strategy.world_size
        )
    return result
