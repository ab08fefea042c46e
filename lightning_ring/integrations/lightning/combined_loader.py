"""Agreement of ranks on several training loaders at once: ranks compare the number of combined
batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities._pytree import _tree_flatten
from lightning.pytorch.utilities.data import sized_len

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import UnevenBatchesError
from lightning_ring.integrations.lightning.same_images import check_same_images
from lightning_ring.integrations.lightning.uneven import (
    WHAT_TO_DO,
    Policy,
    agree_on_batches,
    batches_until_the_end,
    check_none_is_without,
    different_numbers,
    is_stream,
    limited,
    none_at_all,
    ran_out,
    several_cannot_join,
    warn_of_padding,
)

# the other modes: max
_OF_ALL: dict[str, Callable[[list[float]], float]] = {"min_size": min, "sequential": sum}


class AgreedCombinedLoader(CombinedLoader):
    """A `CombinedLoader` on whose number of batches ranks agree: before training if lengths are
    known, else per batch.

    A batch costs one small message then. A loader's length may differ between ranks if the combined
    number does not. An `UnevenBatchesError` is raised on every rank, before the first step or at
    the step for which some rank has no batch. With the policy ``"alone"`` numbers may differ, and
    ranks agree on the first batch of each epoch only.
    """

    def __init__(self, iterables: Any, mode: Any) -> None:
        super().__init__(iterables, mode)
        # of the loaders so far: batches, and whether that is exact
        self._lengths: list[tuple[float, bool]] = []
        self._comm: Communicator | None = None  # if ranks agree on each batch, or on the first one
        self._alone = False
        self._same_length = True
        self._step = 0

    def add(
        self, loader: Any, comm: Communicator, *, policy: Policy, limit: float, needed: float
    ) -> None:
        """Add a loader that Lightning has prepared. After the last loader ranks compare.
        Collective.

        The arguments are those of `agree_on_batches`.
        """
        length = sized_len(loader)
        bound = limited(math.inf if length is None else length, limit)
        self._lengths.append((bound, length is not None and not is_stream(loader)))
        if len(self._lengths) < len(self.flattened):
            return
        bounds, sure = zip(*self._lengths, strict=True)
        self._lengths = []
        by_rank = comm.all_gather_object(
            (_OF_ALL.get(self._mode, max)(list(bounds)), all(sure)), name="lengths of loaders"
        )
        numbers = [number for number, _ in by_rank]
        self._same_length = min(numbers) == max(numbers)
        all_sure = all(is_sure for _, is_sure in by_rank)
        self._alone = policy == "alone"
        if self._alone:
            check_none_is_without(numbers)
        if all_sure and (self._alone or self._same_length or min(numbers) >= needed):
            return
        if policy == "join":
            raise several_cannot_join(len(self.flattened))
        self._comm = comm
        if all_sure:
            raise UnevenBatchesError(
                f"{different_numbers([int(number) for number in numbers])} {WHAT_TO_DO}"
            )

    def __iter__(self) -> Any:
        self._step = 0
        return super().__iter__()

    def __len__(self) -> int:
        length = super().__len__()
        if self._comm is not None and not self._same_length:
            raise TypeError("ranks have different numbers of batches: they agree at each")
        return length

    def __next__(self) -> Any:
        if self._comm is None or (self._alone and self._step > 0):
            return super().__next__()
        try:
            batch, has_data = super().__next__(), True
        except StopIteration:
            batch, has_data = None, False
        having = [
            bool(flag)
            for flag in self._comm.all_gather_object(has_data, name="next training batch")
        ]
        if not any(having):
            raise StopIteration
        if not all(having):
            if self._alone:
                raise UnevenBatchesError(none_at_all(having))
            raise UnevenBatchesError(f"{ran_out(having, self._step)} {WHAT_TO_DO}")
        self._step += 1
        return batch


class TrainingLoaders:
    """Agrees on a Trainer's training loaders, which Lightning prepares one by one."""

    def __init__(self) -> None:
        # of the current loaders, unless there is one only
        self.combined: AgreedCombinedLoader | None = None

    def prepare(self, dataloader: Any, trainer: Trainer, comm: Communicator, policy: Policy) -> Any:
        """Return the loader that ``trainer`` reads instead of ``dataloader``. Collective.

        With the policy ``"alone"`` for training loaders only: ranks may come to an evaluation at
        different times.
        """
        warn_of_padding(dataloader, comm.world_size)
        trains = (
            trainer.state.stage == RunningStage.TRAINING and trainer.state.fn == TrainerFn.FITTING
        )
        if trains or policy != "alone":
            check_same_images(dataloader, comm)
        if not trains:
            return dataloader
        limit, needed = trainer.limit_train_batches, batches_until_the_end(trainer)
        if self.combined is None:
            return agree_on_batches(dataloader, comm, policy, limit=limit, needed=needed)
        self.combined.add(dataloader, comm, policy=policy, limit=limit, needed=needed)
        return dataloader

    def follow(self, trainer: Trainer) -> None:
        """Cover the loaders of ``trainer``, now and whenever they are reloaded."""
        source = trainer.fit_loop._data_source
        source.dataloader = functools.partial(self._request, type(source).dataloader, source)  # type: ignore[method-assign]

    def release(self, trainer: Trainer) -> None:
        vars(trainer.fit_loop._data_source).pop("dataloader", None)
        self.combined = None

    def _request(self, dataloader: Callable[[Any], Any], source: Any) -> Any:
        self.combined = None
        loaders = dataloader(source)
        if type(loaders) is CombinedLoader:
            iterables, mode = loaders.iterables, loaders._mode
        elif isinstance(loaders, CombinedLoader):
            return loaders  # a subclass of the user
        else:
            iterables, mode = loaders, "max_size_cycle"
        if len(_tree_flatten(iterables)[0]) < 2:
            return loaders
        self.combined = AgreedCombinedLoader(iterables, mode)
        return self.combined
