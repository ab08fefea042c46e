"""Training batches over the ranks: agreement on their number, and on the images that they hold.

Ranks compare the lengths of their training loaders. Different lengths are an error under
``uneven="error"``. Under ``uneven="join"``, and for iterable data sets, all ranks exchange at every
batch whether they have one. With ``"join"`` a rank without data repeats its last batch, whose
gradient counts as zero: it makes the same collective calls in ``training_step`` and does not count
in buffers and logged means. Metric objects that count by themselves do see it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from lightning.pytorch.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset
from torchmetrics import Metric

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError, RingError, UnevenBatchesError

Policy = Literal["error", "join", "alone"]
"""``RingStrategy(uneven=)``; ``"alone"`` if ranks go at their own pace."""

_WHAT_TO_DO = (
    "Give every rank the same number of batches (a DistributedSampler, which Lightning puts in "
    "unless use_distributed_sampler=False, or limit_train_batches), or let the others finish with "
    "RingStrategy(uneven='join')."
)


class TrainingLoaders:
    """Agrees on a Trainer's training loaders, which Lightning prepares one by one.

    Attributes:
        joining: The loader that continues until no rank has data.
    """

    def __init__(self) -> None:
        self.joining: AgreedLoader | None = None
        self._combined: CombinedLoader
        self._num_batches: list[Any] = []  # of each loader so far
        self._exact = True  # none of them may end before

    def follow(self, trainer: Trainer) -> None:
        source = trainer.fit_loop._data_source
        source.dataloader = functools.partial(self._request, source)  # type: ignore[method-assign]

    def release(self, trainer: Trainer) -> None:
        vars(trainer.fit_loop._data_source).pop("dataloader", None)

    def _request(self, source: Any) -> CombinedLoader:
        loaders = type(source).dataloader(source)
        if not isinstance(loaders, CombinedLoader):
            loaders = CombinedLoader(loaders, "max_size_cycle")  # as Lightning does next
        self._combined, self._num_batches, self._exact = loaders, [], True
        return loaders

    def prepare(self, dataloader: Any, trainer: Trainer, comm: Communicator, policy: Policy) -> Any:
        """Return the loader that ``trainer`` reads instead of ``dataloader``. Collective.

        With ``"alone"`` for training loaders only: ranks may come to an evaluation at different
        times. Ranks may differ in one of several loaders, if all together give equally many
        batches.

        Raises:
            UnevenBatchesError: They differ in that, on every rank, and do not join.
            ConfigurationError: One of several loaders does not tell its length, or they are to
                join.
        """
        warn_of_padding(dataloader, comm.world_size)
        if trainer.training or policy != "alone":
            check_same_images(dataloader, comm)
        if not trainer.training:
            return dataloader
        if isinstance(dataloader, AgreedLoader):  # of an earlier fit, in a `CombinedLoader`
            dataloader = dataloader._loader
        length, limit = sized_len(dataloader), trainer.limit_train_batches
        self._num_batches.append(_limited(math.inf if length is None else length, limit))
        # an iterable data set may end before its length
        stream = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
        self._exact &= length is not None and not stream
        if len(self._num_batches) < len(self._combined.flattened):
            return dataloader
        agreed = self._agree(dataloader, length, comm, policy, _batches_until_the_end(trainer))
        self.joining = None
        if policy == "join" and isinstance(agreed, AgreedLoader):
            _check_join_allowed(trainer.lightning_module)
            self.joining = agreed
        return agreed

    def _agree(
        self, loader: Any, length: int | None, comm: Communicator, policy: Policy, needed: float
    ) -> Any:
        """``needed``: the number of batches after which training ends anyway."""
        batches_of_all = _SUPPORTED_MODES[self._combined._mode]["fn"](self._num_batches)
        mine = batches_of_all, length, self._exact
        described: list[Any] = comm.all_gather_object(mine, name="length of the training loader")
        numbers, lengths, exact = zip(*described, strict=True)
        few, many, num_loaders = min(numbers), max(numbers), len(self._num_batches)
        if num_loaders > 1 and not all(exact):
            raise ConfigurationError(
                f"the fit got {num_loaders} training loaders, of which one has an iterable "
                "data set or no length: ranks could not tell which of them ends first. Use one "
                "training loader, or data sets with a length."
            )
        if None in lengths:
            return AgreedLoader(loader, comm, policy, None)
        uneven = policy != "alone" and few < min(many, needed)
        if policy == "alone" and few == 0 < many:
            raise UnevenBatchesError(_none_at_all(numbers))
        if uneven and policy == "error":
            fewest = numbers.index(few)
            raise UnevenBatchesError(
                f"ranks have different numbers of training batches: rank {fewest} has {few}, rank "
                f"{numbers.index(many)} has {many}. At step {few} of the epoch (counted from 0) "
                f"rank {fewest} would have none. {_WHAT_TO_DO}"
            )
        if uneven and num_loaders > 1:
            raise ConfigurationError(
                f"RingStrategy(uneven='join') was given {num_loaders} training loaders, "
                "expected one. Combine them into one data set, or use uneven='error'."
            )
        if all(exact) and not uneven:
            return loader
        longest = lengths[comm.rank] if policy == "alone" else max(lengths)
        return AgreedLoader(loader, comm, policy, longest)


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Number of ranks with data for a batch, and whether this rank has data."""

    active_ranks: int
    has_data: bool


class AgreedLoader:
    """A training loader on whose every batch all ranks agree, by one small message per batch.

    It is used for iterable data sets, or if ``uneven="join"``. Then it continues until no rank has
    data, and a rank without data repeats its own last batch (`ActiveRanks.step`). With ``"error"``
    all ranks raise at the step for which some rank has no batch. With ``"alone"`` ranks agree on
    the first batch of each epoch only.
    """

    def __init__(self, loader: Any, comm: Communicator, policy: Policy, length: int | None) -> None:
        self._loader = loader
        self._comm = comm
        self._policy = policy
        self._length = length
        # Lightning fetches batches ahead: a status waits here until its batch is trained on.
        self.statuses: deque[BatchStatus] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # during unpickling: nothing to delegate to yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length on some rank")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.statuses.clear()
        batches = iter(self._loader)
        last: Any = None
        step = 0
        while True:
            try:
                batch, has_data = next(batches), True
            except StopIteration:
                batch, has_data = last, False
            having = [has_data]
            if self._policy != "alone" or step == 0:
                having = self._comm.all_gather_object(has_data, name="next training batch")
            if not any(having):
                return
            if not all(having):
                self._allow(having, step)
            if self._policy == "join":
                self.statuses.append(BatchStatus(sum(having), has_data))
            yield batch
            last, step = batch, step + 1

    def _allow(self, having: list[bool], step: int) -> None:
        """Raise the error once every rank knows of it."""
        if self._policy == "error":
            error = (
                f"rank {_listed(having, False)} ran out of training batches at step {step} of the "
                f"epoch (counted from 0), while rank {_listed(having, True)} still had some. "
                f"{_WHAT_TO_DO}"
            )
        elif step == 0:
            error = _none_at_all(having)
        else:
            return
        with suppress(RingError):
            self._comm.barrier(name="the error of uneven batches")
        raise UnevenBatchesError(error)


class ActiveRanks:
    """The ranks that have data for the current batch: all, unless a loader joins."""

    def __init__(self) -> None:
        self.during_step: BatchStatus | None = None  # the current status while a training step runs
        self._current: BatchStatus | None = None
        self._window_ranks = 0

    @property
    def has_data(self) -> bool:
        return self._current is None or self._current.has_data

    def take(self, joining: AgreedLoader | None, batch_idx: int, accumulated: int) -> int | None:
        """Take the next batch. Returns how many ranks its gradient averages over, `None` for all.

        Of ``accumulated`` micro-batches a rank counts if it had data for the first one.
        """
        if joining is None:
            self._current = None  # an earlier loader may have ended without data on this rank
            return None
        self._current = joining.statuses.popleft()
        if batch_idx % accumulated == 0:
            self._window_ranks = self._current.active_ranks
        return self._window_ranks

    @contextmanager
    def step(self, module: LightningModule) -> Iterator[None]:
        self.during_step = self._current
        try:
            with nullcontext() if self.has_data else _discarding_effects(module):
                yield
        finally:
            self.during_step = None


@contextmanager
def _discarding_effects(module: LightningModule) -> Iterator[None]:
    """Around the training step of a rank without data, which repeats its last batch.

    The step makes the same collective calls as on other ranks (``self.log(..., sync_dist=True)``),
    without effect on gradients, buffers, metrics or logged means.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [
        (metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)
    ]
    log = module.log

    def log_without_weight(*args: Any, **kwargs: Any) -> None:
        log(*args, **(kwargs | {"batch_size": 0}))

    module.log = log_without_weight  # type: ignore[method-assign]
    try:
        yield  # with gradients enabled, for steps that call torch.autograd.grad (penalties, forces)
    finally:
        del module.log
        for metric, state in metrics:
            for name, value in state.items():
                setattr(metric, name, value)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # without autograd: a backward may follow


def _metric_state(metric: Metric) -> dict[str, Any]:
    state = {}
    for name in (*metric.metric_state, "_update_count", "_computed", "_forward_cache"):
        value = getattr(metric, name)
        state[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
    return state


def _none_at_all(having: Sequence[object]) -> str:
    """``having``: by rank."""
    return (
        f"rank {_listed(having, False)} has no training batch at all in this epoch, while rank "
        f"{_listed(having, True)} has some. Give every rank at least one batch in each epoch."
    )


def _listed(having: Sequence[object], wanted: bool) -> str:
    ranks = [rank for rank, has in enumerate(having) if bool(has) == wanted]
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _check_join_allowed(module: LightningModule) -> None:
    """Check the conditions of ``uneven="join"``."""
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


def _limited(length: float, limit: float) -> float:
    """Number of batches under ``limit_train_batches``. A fraction of infinity is infinity."""
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)


def _batches_until_the_end(trainer: Trainer) -> float:
    """Training batches until ``max_steps``; infinity if unlimited or unknown."""
    if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
        return math.inf
    return (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches


def warn_of_padding(dataloader: object, world_size: int) -> None:
    """Warn on rank 0 if the loader's sampler repeats or drops samples."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    num_samples, written = len(sampler.dataset), written_sampler(sampler)  # type: ignore[arg-type]
    name = type(written).__name__
    if written is not sampler:
        name += ", cut for the ranks,"
    num_padded = sampler.total_size - num_samples
    if num_padded > 0:
        what = f"repeats {num_padded} of them each epoch, so that all ranks have equally many"
    elif num_padded < 0 and sampler.drop_last:
        what = f"drops {-num_padded} of them each epoch"
    else:
        return
    rank_zero_warn(
        f"lightning_ring: {num_samples} samples do not divide by {world_size} ranks: {name} {what}."
    )


def written_sampler(sampler: Any) -> Any:
    """``sampler``, or the script's own inside a `DistributedSamplerWrapper`."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", sampler)


def check_same_images(dataloader: Any, comm: Communicator) -> None:
    """Compare the sets that loaders of `image_loader` read. Collective for those.

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
