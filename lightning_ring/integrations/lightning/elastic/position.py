"""Where a fit stands in its training data."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.data import written_sampler


class TrainingPosition:
    """The position in the order of an `OrderedSampler`, before and after the current step.

    Attributes:
        batch_size: Samples of a batch of one rank.
        num_batches: Batches of the current step, of one rank.
        num_ranks: For how many ranks the loader counts the batches of the epoch.

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
                "An elastic fit needs one training loader whose order does not depend on the "
                "number of ranks: a DataLoader with batch_size=..., and no sampler of its own or "
                "one of lightning_ring.data. "
                + (
                    _as_written(loaders[0])
                    if len(loaders) == 1
                    else f"This fit has {len(loaders)} training loaders."
                )
            )
        self._sampler = sampler
        self.batch_size = batch_size
        self.num_ranks = sampler.num_replicas
        self._epoch = trainer.current_epoch
        state = sampler.state_dict()  # also of a fit that goes on within an epoch
        begins = (state["position"], state["taken"]) if state["epoch"] == self._epoch else (0, 0)
        # of the iteration: global position, samples of each rank, batches before it
        self._origin = (*begins, 0)
        self._before_first = True  # batches before it are unknown
        self._first = 0  # batch of the current step
        self.num_batches = 1
        self._before = self._after = self._state(0)

    def begin_step(self) -> None:
        if self._epoch != self._trainer.current_epoch:
            self._epoch, self._origin = self._trainer.current_epoch, (0, 0, 0)
            self._after = self._state(0)
        elif self._before_first:
            self._origin = (*self._origin[:2], self._batch_idx)
        self._before_first = False
        self._first = self._batch_idx
        self._before = self._after

    def end_step(self) -> None:
        """Keep the position after the step's last batch."""
        self.num_batches = self._batch_idx - self._first + 1
        self._after = self._state(self._batch_idx + 1 - self._origin[2])

    def as_planned(self) -> AbstractContextManager[None]:
        """The loader counts its batches for `num_ranks`, also after deaths."""
        rank = min(self._sampler.rank, self.num_ranks - 1)
        return self._sampler.placed(rank, self.num_ranks)

    def go_back(self) -> Any:
        """Let the loader go back to the step's first batch, with the current ranks; returns it.

        The step takes `num_batches` again, of which `fetch` returns the others.
        """
        self._restart(self._before, self._first)
        batch = self.fetch()
        self._after = self._state(self.num_batches)
        return batch

    def begin_epoch(self) -> None:
        """Count the batches of an epoch that begins with other ranks."""
        self._epoch = self._trainer.current_epoch
        self._sampler.set_epoch(self._epoch)
        self._sampler.rewind()
        self._origin = (0, 0, 0)
        self._restart(self._state(0), 0)

    def fetch(self) -> Any:
        """The next batch, as Lightning prepares it."""
        trainer = self._trainer
        batch, _, _ = next(self._fetcher)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self._fetcher.done
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    @property
    def order(self) -> str:
        return f"{self._sampler.kind} of {self._sampler.fingerprint}, seed {self._sampler.seed}"

    def has_batches_for(self, ranks: int) -> bool:
        """Whether each of ``ranks`` has a batch left after the current step."""
        ended = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        begins_epoch = ended or self._epoch != self._trainer.current_epoch
        position, done = (0, 0) if begins_epoch else (self._after["position"], self._batch_idx + 1)
        try:
            with self._sampler.placed(ranks - 1, ranks):
                total = done + self._sampler.num_left(position) // self.batch_size
            limited = _parse_num_batches(
                RunningStage.TRAINING, total, self._trainer.limit_train_batches
            )
        except (ConfigurationError, MisconfigurationException):
            return False  # too few classes for a step, or no batch within the limit
        return bool(limited > done)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "after": self._after}

    def join(self) -> None:
        self._sampler.presumed = None

    def enter(self, state: dict[str, Any]) -> None:
        """Go on from another rank's `state_dict`, with the current ranks."""
        done = self._batch_idx + 1
        with self.as_planned():
            if done:
                # the size of batches may have changed
                taken = {"taken": done * self.batch_size}
                self._epoch = state["epoch"]
                self._restart(state["after"] | taken, done)
                progress = self._trainer.fit_loop.epoch_loop.batch_progress
                progress.is_last_batch = self._fetcher.done
            else:
                self.begin_epoch()
        self._fetcher.fetched = 0  # the epoch's loop adds the batches before

    @property
    def _batch_idx(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_idx

    @property
    def _combined(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    @property
    def _fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    def _state(self, batches: int) -> dict[str, Any]:
        position, taken, _ = self._origin
        num = min(batches * self.batch_size, self._sampler.num_left(position))
        place = {"position": self._sampler.advanced(position, num), "taken": taken + num}
        return self._sampler.state_dict() | place | {"epoch": self._sampler.epoch}

    def _restart(self, state: dict[str, Any], done: int) -> None:
        """Begin an iteration at ``state``, after ``done`` batches of the epoch."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        self._origin, self._before_first = (state["position"], state["taken"], done), False
        self._after, self.num_ranks = state, self._sampler.num_replicas
        loader = self._combined.flattened[0]
        if hasattr(loader, "trained_state"):  # the package's loader counts batches itself
            loader.load_state_dict({"sampler": state, "batches": done})
        else:
            self._sampler.load_state_dict(state)
        total = _parse_num_batches(RunningStage.TRAINING, len(loader), trainer.limit_train_batches)
        fit.max_batches, self._combined.limits = total, [total]
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(total * trainer.val_check_interval))
        iter(self._fetcher)
        self._fetcher.fetched, self._fetcher.length = done, int(total)
        self._fetcher.done = done >= total


def rewind_loaders(trainer: pl.Trainer) -> None:
    """Rewind training loaders to where they stand in a new process."""
    combined = trainer.fit_loop._combined_loader
    for loader in combined.flattened if combined is not None else ():
        if isinstance(sampler := getattr(loader, "sampler", None), OrderedSampler):
            sampler.set_epoch(0)
            sampler.rewind()
            if hasattr(loader, "trained_state"):
                loader.load_state_dict({"sampler": sampler.state_dict(), "batches": 0})


def _as_written(loader: Any) -> str:
    """What an elastic fit cannot have of ``loader``, in the script's words."""
    if not isinstance(loader, DataLoader):
        return f"This one is a {type(loader).__name__}."
    if isinstance(loader.dataset, IterableDataset):
        return f"This one reads {type(loader.dataset).__name__}, an IterableDataset."
    if loader.batch_sampler is None:
        return "This one has batch_size=None."
    if loader.batch_size is None:
        return f"This one has batch_sampler={type(loader.batch_sampler).__name__}(...)."
    sampler = written_sampler(loader.sampler)
    name = type(sampler).__name__
    if sampler is loader.sampler and isinstance(sampler, (RandomSampler, SequentialSampler)):
        return (
            f"This one has the {name} of torch, as Trainer(use_distributed_sampler=False) leaves "
            "it."
        )
    return f"This one has sampler={name}(...)."
