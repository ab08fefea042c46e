"""Training batches over the ranks: agreement on their number, for one loader and for several, and
on the images that they hold.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities._pytree import _tree_flatten
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


def check_same_images(dataloader: Any, comm: Communicator) -> None:
    """Compare the sets that the loaders of `image_loader` read. Collective for those, nothing for
    others.

    Raises `ConfigurationError`: on every rank, if two of them read different images.
    """
    if getattr(dataloader, "images", None) is None:
        return
    mine = dataloader.images, dataloader.sampler.fingerprint
    found: list[Any] = comm.all_gather_object(mine, name="images of a loader")
    if other := next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None):
        shown = [
            f"rank {rank} reads {found[rank][0]!r} in the order of {found[rank][1]!r}"
            for rank in (0, other)
        ]
        raise ConfigurationError(
            f"ranks read different images: {', '.join(shown)}. A set may have changed while they "
            "started. Start the job again, or name the state of the set: ShardDataset(..., "
            "generation=N)."
        )
