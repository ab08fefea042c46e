"""Agreement of ranks on the number of training batches, so that no rank waits for a batch that
never comes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError, RingError, UnevenBatchesError

Policy = Literal["error", "join", "alone"]
"""``RingStrategy(uneven=)``; ``"alone"`` where ranks go at their own pace: each needs one batch in
every epoch."""


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """One batch of the training loader: number of ranks with data for it, and whether this rank
    has data.
    """

    active_ranks: int
    has_data: bool


class AgreedLoader:
    """A training loader on whose every batch all ranks agree, by one small message per batch.

    It is used if lengths are unknown (iterable data sets), or if ``uneven="join"`` lets ranks run
    out at different steps. Then it continues on every rank until no rank has data, and a rank
    without data repeats its own last batch (`ActiveRanks.step`). With ``"error"`` all ranks raise
    at the step for which some rank has no batch. With ``"alone"`` ranks agree on the first batch of
    each epoch only.
    """

    def __init__(self, loader: Any, comm: Communicator, policy: Policy, length: int | None) -> None:
        self._loader = loader
        self._comm = comm
        self._policy = policy
        self._length = length
        # Lightning fetches batches ahead, so a status waits here until its batch is trained on.
        # With "error" none is needed: all ranks have data whenever one has.
        self._statuses: deque[BatchStatus] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # during unpickling: nothing to delegate to yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._statuses.clear()
        batches = iter(self._loader)
        last: Any = None
        step = 0
        while True:
            try:
                batch, has_data = next(batches), True
            except StopIteration:
                batch, has_data = last, False
            if self._policy != "alone" or step == 0:
                having = [
                    bool(flag)
                    for flag in self._comm.all_gather_object(has_data, name="next training batch")
                ]
            else:
                having = [has_data]
            if not any(having):
                return
            if not all(having):
                self._allow(having, step)
            if self.joins:
                self._statuses.append(BatchStatus(sum(having), has_data))
            yield batch
            last, step = batch, step + 1

    @property
    def unwrapped(self) -> Any:
        return self._loader

    @property
    def joins(self) -> bool:
        return self._policy == "join"

    def next_status(self) -> BatchStatus:
        return self._statuses.popleft()

    def _allow(self, having: list[bool], step: int) -> None:
        if self._policy == "error":
            self._refuse(f"{ran_out(having, step)} {WHAT_TO_DO}")
        if step == 0:
            self._refuse(none_at_all(having))

    def _refuse(self, message: str) -> NoReturn:
        """Raise the error once every rank knows of it.

        If a rank ended earlier, the others would report its end instead of this error.
        """
        with suppress(RingError):
            self._comm.barrier(name="the error of uneven batches")
        raise UnevenBatchesError(message)


WHAT_TO_DO = (
    "Give every rank the same number of batches (a DistributedSampler, which Lightning puts in "
    "unless use_distributed_sampler=False, or limit_train_batches), or let the others finish with "
    "RingStrategy(uneven='join')."
)


def agree_on_batches(
    loader: Any, comm: Communicator, policy: Policy, *, limit: float, needed: float
) -> Any:
    """Return ``loader`` if all ranks have the batches that ``policy`` asks for; else follow it.
    Collective.

    ``limit`` is ``Trainer(limit_train_batches=)``: a number of batches if an int, a fraction if a
    float. ``needed`` is the number of batches after which training ends anyway (from
    ``max_steps``); ``inf`` if open.
    """
    if isinstance(loader, AgreedLoader):  # from an earlier fit, in the script's `CombinedLoader`
        loader = loader.unwrapped
    described: list[tuple[int | None, bool]] = comm.all_gather_object(
        (sized_len(loader), is_stream(loader)), name="length of the training loader"
    )
    lengths = [length for length, _ in described]
    if any(length is None for length in lengths):
        return AgreedLoader(loader, comm, policy, None)
    used = [int(limited(length, limit)) for length in lengths if length is not None]
    streams = any(is_stream for _, is_stream in described)
    if policy == "alone":
        check_none_is_without(used)
        return AgreedLoader(loader, comm, policy, sized_len(loader)) if streams else loader
    if min(used) == max(used) or min(used) >= needed:
        return (
            AgreedLoader(loader, comm, policy, max(filter(None, lengths), default=0))
            if streams
            else loader
        )
    if policy == "error":
        raise UnevenBatchesError(f"{different_numbers(used)} {WHAT_TO_DO}")
    return AgreedLoader(
        loader, comm, policy, max(length for length in lengths if length is not None)
    )


def different_numbers(used: list[int]) -> str:
    """``used``: each rank's number of batches."""
    fewest, most = used.index(min(used)), used.index(max(used))
    return (
        f"ranks have different numbers of training batches: rank {fewest} has {used[fewest]}, rank "
        f"{most} has {used[most]}. At step {used[fewest]} of the epoch (counted from 0) rank "
        f"{fewest} would have none."
    )


def ran_out(having: list[bool], step: int) -> str:
    """``having``: which ranks have a batch."""
    return (
        f"rank {_listed([rank for rank, has in enumerate(having) if not has])} ran out of training "
        f"batches at step {step} of the epoch (counted from 0), while rank "
        f"{_listed([rank for rank, has in enumerate(having) if has])} still had some."
    )


def none_at_all(having: Sequence[object]) -> str:
    """``having``: by rank, false or 0 for one without a batch."""
    return (
        f"rank {_listed([rank for rank, has in enumerate(having) if not has])} has no training "
        "batch at all in this epoch, while rank "
        f"{_listed([rank for rank, has in enumerate(having) if has])} has some. Give every rank at "
        "least one batch in each epoch."
    )


def check_none_is_without(numbers: Sequence[float]) -> None:
    """Raise `UnevenBatchesError` if some ranks have no batch and others have: ``numbers``, by
    rank.
    """
    if min(numbers) == 0 < max(numbers):
        raise UnevenBatchesError(none_at_all(numbers))


def is_stream(loader: Any) -> bool:
    """Whether the loader may end before its length: iterable data sets may."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def check_join_allowed(num_loaders: int, module: LightningModule) -> None:
    """Check the conditions of ``uneven="join"``, without which the ranks' collectives would
    differ.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "RingStrategy(uneven='join') was given a module with manual optimization, in which a "
            "finished rank cannot know how many backward passes the others run. Use automatic "
            "optimization, or uneven='error'."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "RingStrategy(uneven='join') was given a training_step(dataloader_iter), which "
            "fetches batches by itself, so that it is unknown which rank has data. Let it take "
            "(batch, batch_idx), or use uneven='error'."
        )
    if num_loaders > 1:
        raise several_cannot_join(num_loaders)


def several_cannot_join(num_loaders: int) -> ConfigurationError:
    return ConfigurationError(
        f"RingStrategy(uneven='join') was given {num_loaders} training loaders, expected one. "
        "Combine them into one data set, or use uneven='error'."
    )


def limited(length: float, limit: float) -> float:
    """Number of batches of a loader under ``limit_train_batches``. A fraction of infinity is
    infinity.
    """
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def batches_until_the_end(trainer: Trainer) -> float:
    """Training batches until ``max_steps`` ends training; infinity if there is no such limit or
    it is unknown.
    """
    if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
        return math.inf
    return (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches


def warn_of_padding(dataloader: object, world_size: int) -> None:
    """Warn on rank 0 if the loader's sampler repeats or drops samples to give all ranks equally
    many.
    """
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or isinstance(
        sampler, UnrepeatedDistributedSampler
    ):
        return
    num_samples, name = len(cast(Sized, sampler.dataset)), type(written_sampler(sampler)).__name__
    if written_sampler(sampler) is not sampler:
        name += ", cut for the ranks,"
    num_padded = sampler.total_size - num_samples
    if sampler.drop_last and num_padded < 0:
        rank_zero_warn(
            f"lightning_ring: {num_samples} samples do not divide by {world_size} ranks: "
            f"{name} drops {-num_padded} of them each epoch."
        )
    elif num_padded > 0:
        rank_zero_warn(
            f"lightning_ring: {num_samples} samples do not divide by {world_size} ranks: "
            f"{name} repeats {num_padded} of them each epoch, so that all ranks have equally many."
        )


def written_sampler(sampler: Any) -> Any:
    """``sampler``, or the one of the script that Lightning put into a
    `DistributedSamplerWrapper`, its own class.
    """
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
