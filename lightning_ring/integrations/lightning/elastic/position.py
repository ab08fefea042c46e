"""Where a fit stands in its training data, and how its loader goes on from there with other ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.errors import ConfigurationError


class TrainingPosition:
    """The position in the order of an `OrderedSampler`, in samples of all ranks, before and after the current step.

    Raises:
        ConfigurationError: The training loader has no such order.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        loaders = self._combined.flattened
        sampler = getattr(loaders[0], "sampler", None) if len(loaders) == 1 else None
        batch_size = getattr(loaders[0], "batch_size", None)
        if not isinstance(sampler, OrderedSampler) or not isinstance(batch_size, int):
            raise ConfigurationError(
                "An elastic fit needs one training DataLoader(..., batch_size=..., sampler=ShuffledSampler(len(data))) "
                f"(lightning_ring.data), whose order does not depend on the number of ranks; this one has "
                f"{len(loaders)} loaders, and the first one's sampler is {type(sampler).__name__}."
            )
        self._sampler = sampler
        self._batch_size = batch_size
        self._epoch = -1
        self._origin = (0, 0, 0)  # of the loader's iteration: global position, samples of each rank, batches before it
        self._before = self._after = self._state(0)

    def begin_step(self) -> None:
        """Keep the positions before and after the current batch, as long as the ranks are those that read it."""
        if self._epoch != self._trainer.current_epoch:
            self._epoch, self._origin = self._trainer.current_epoch, (0, 0, 0)
        batches = self._trainer.fit_loop.epoch_loop.batch_idx - self._origin[2]
        self._before, self._after = self._state(batches), self._state(batches + 1)

    def go_on(self, *, after_step: bool) -> Any:
        """Let the loader go on with the ranks that there are now; returns the batch that replaces the current one.

        ``after_step``: the current step is finished, and `None` is returned.
        """
        done = self._trainer.fit_loop.epoch_loop.batch_idx + after_step
        return self._restart(self._after if after_step else self._before, done, fetch=not after_step)

    def read_again(self) -> Any:
        """The batch that replaces the current one, which was read before the ranks changed; its step has not begun."""
        if self._epoch != self._trainer.current_epoch:
            return self.begin_epoch(fetch=True)
        return self._restart(self._after, self._trainer.fit_loop.epoch_loop.batch_idx, fetch=True)

    def begin_epoch(self, *, fetch: bool = False) -> Any:
        """Count the batches of an epoch that begins with other ranks than the fit; with ``fetch`` its first batch."""
        self._epoch = self._trainer.current_epoch
        self._sampler.set_epoch(self._epoch)
        self._sampler.rewind()
        self._origin = (0, 0, 0)
        return self._restart(self._state(0), 0, fetch=fetch)

    @property
    def _combined(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    def _state(self, batches: int) -> dict[str, Any]:
        position, taken, _ = self._origin
        num = min(batches * self._batch_size, self._sampler.num_left(position))
        place = {"position": self._sampler.advanced(position, num), "taken": taken + num}
        return self._sampler.state_dict() | place | {"epoch": self._sampler.epoch}

    def _restart(self, state: dict[str, Any], done: int, *, fetch: bool) -> Any:
        trainer, fit = self._trainer, self._trainer.fit_loop
        self._sampler.load_state_dict(state)
        self._origin = (state["position"], state["taken"], done)
        self._after = state
        total = _parse_num_batches(RunningStage.TRAINING, len(self._combined.flattened[0]), trainer.limit_train_batches)
        fit.max_batches, self._combined.limits = total, [total]
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(total * trainer.val_check_interval))
        fetcher = fit._data_fetcher
        assert fetcher is not None
        iter(fetcher)
        fetcher.fetched, fetcher.length = done, int(total)
        fetcher.done = done >= total
        batch = None
        if fetch:
            batch, _, _ = next(fetcher)
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        if done or fetch:
            fit.epoch_loop.batch_progress.is_last_batch = fetcher.done
        return batch
