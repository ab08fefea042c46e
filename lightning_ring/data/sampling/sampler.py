"""Samplers with one global order for all ranks: the base class, and shuffling."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from typing_extensions import Unpack

from lightning_ring.data.sampling.counters import Ints, Stream, permute, subkey
from lightning_ring.errors import ConfigurationError

log = logging.getLogger(__name__)

Remainder = Literal["repeat", "drop", "keep"]


class SamplerOptions(TypedDict, total=False):
    """What every sampler takes, see `OrderedSampler`."""

    seed: int
    rank: int | None
    world_size: int | None
    fingerprint: str | None


class OrderedSampler(DistributedSampler[int]):
    """One global order for all ranks, a function of (seed, epoch, position); this rank takes its
    slice of each step.

    Neither the number of ranks nor that of workers changes the order: restored at another world
    size, training goes on with the same one. A `DistributedSampler`, so that Lightning leaves it in
    place and tells it the epoch.

    Args:
        seed: Chooses the order.
        rank, world_size: Left out, both are asked of torch.distributed when iteration starts
            (Lightning has started it by then); where it is not initialised there is one process.
        fingerprint: Says which data set this is; a state of another one is refused.
        default_fingerprint: The same, from a subclass, if ``fingerprint`` is left out.

    Attributes:
        epoch: Set by `set_epoch`, which Lightning calls.
        position: Where in the global order, counted in samples, the next iteration starts: 0 unless
            a state was loaded.
        presumed: Rank and world size as long as this process is not connected to the others, which
            it joins later, and inside `placed`.
    """

    kind: str

    def __init__(
        self,
        default_fingerprint: str = "",
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._given: tuple[int, int] | None = None
        if rank is not None or world_size is not None:
            if rank is None or world_size is None or not 0 <= rank < world_size:
                raise ConfigurationError(
                    f"rank={rank} and world_size={world_size} were given, expected neither, or a "
                    "rank of 0 to world_size - 1."
                )
            self._given = rank, world_size
        if not 0 <= seed < 2**63:
            raise ConfigurationError(f"seed={seed} was given, expected 0 to 2^63 - 1.")
        self.presumed: tuple[int, int] | None = None
        self.seed = seed
        self.epoch = 0
        self.fingerprint = fingerprint or default_fingerprint
        self.position = 0
        self._taken = 0  # of this epoch, by each rank, before `position`

    # -- what an order defines

    @abstractmethod
    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        """This rank's samples from `position` on, in pieces: their global positions, and their
        indices.
        """

    @abstractmethod
    def advanced(self, position: int, num: int) -> int:
        """The global position after every rank has taken ``num`` samples from ``position`` on."""

    @abstractmethod
    def num_left(self, position: int) -> int:
        """How many samples this rank takes from ``position`` to the end of the epoch."""

    # -- ranks

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._place[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._place[1]

    @contextmanager
    def placed(self, rank: int, world_size: int) -> Iterator[None]:
        """Inside, rank and world size are these, unless others were given when the sampler was
        made.
        """
        before, self.presumed = self.presumed, (rank, world_size)
        try:
            yield
        finally:
            self.presumed = before

    @property
    def _place(self) -> tuple[int, int]:
        if known := self._given or self.presumed:
            return known
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    # -- iteration

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        for _, indices in self.blocks():
            yield from indices.tolist()
        if self.epoch == epoch:
            self.rewind()

    def __len__(self) -> int:
        """Samples of this rank in this epoch, those before `position` included, as Lightning
        counts batches.
        """
        return self._taken + self.num_left(self.position)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        return len(self)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.rewind()

    def rewind(self) -> None:
        """Back to the start of the epoch; an iteration that reached its end has done so."""
        self.position = self._taken = 0

    # -- state

    def state_dict(self, trained: int = 0) -> dict[str, Any]:
        """The same on every rank.

        Args:
            trained: Samples that this rank has trained on since the iteration began; a loader has
                fetched more.
        """
        return {
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.advanced(self.position, trained),
            "taken": self._taken + trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called, also with another number of ranks. The state's seed
        replaces this one's.

        Raises:
            ConfigurationError: The state is of another data set, or of an order with other
                settings.
        """
        for name, mine in (("kind", self.kind), ("fingerprint", self.fingerprint)):
            if (saved := state.get(name)) != mine:
                raise ConfigurationError(
                    f"the saved state of a sampler has {name} {saved!r}, but this one has "
                    f"{mine!r}: its position means nothing here. Use the data set and settings of "
                    "the saved run, or start a new one."
                )
        if state["seed"] != self.seed:
            log.warning(
                "lightning_ring: the sampler goes on with seed %s of the saved run, not %s.",
                state["seed"],
                self.seed,
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self.position, self._taken = state["position"], state["taken"]


class StridedSampler(OrderedSampler):
    """An order of ``length`` positions; rank r takes r, r + world size, ... A step of all ranks
    is one stretch.
    """

    def __init__(
        self,
        length: int,
        remainder: Remainder,
        default_fingerprint: str,
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(default_fingerprint, **options)
        if remainder not in get_args(Remainder):
            raise ConfigurationError(
                f"remainder={remainder!r} was given, expected 'repeat', 'drop' or 'keep'."
            )
        if length <= 0:
            raise ConfigurationError("the data set is empty: there is nothing to sample.")
        self.length = length
        self.remainder = remainder
        self.dataset = range(length)  # type: ignore[assignment]  # only its length is asked for
        self.drop_last = remainder == "drop"

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples of all ranks in an epoch."""
        if self.remainder == "keep":
            return self.length
        return self.num_left(0) * self.num_replicas

    def advanced(self, position: int, num: int) -> int:
        return min(position + num * self.num_replicas, self.length)

    def num_left(self, position: int) -> int:
        left, ranks = self.length - position, self.num_replicas
        if self.remainder == "keep":
            return max(0, -(-(left - self.rank) // ranks))
        return left // ranks if self.remainder == "drop" else -(-left // ranks)


_BLOCK = 8192  # positions computed at a time: a few milliseconds


class ShuffledSampler(StridedSampler):
    """Every one of ``size`` samples once an epoch. Starts at once and takes no memory, however many
    there are.

    Args:
        size: Samples in the data set.
        shuffle: False: in order, for evaluation.
        remainder: If ``size`` does not divide by the ranks: ``"repeat"`` gives the last step
            samples of the epoch's start again, as torch's sampler does; ``"drop"`` leaves the last
            ones out of this epoch; ``"keep"`` gives some ranks one sample more, so that each is
            seen exactly once.
        options: ``seed``, ``rank``, ``world_size``, ``fingerprint``: see `OrderedSampler`.
    """

    def __init__(
        self,
        size: int,
        *,
        shuffle: bool = True,
        remainder: Remainder = "repeat",
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(size, remainder, f"{size} samples", **options)
        self.shuffle = shuffle
        self.kind = "shuffled" if shuffle else "in order"

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        num, key = self.num_left(self.position), subkey(self.seed, Stream.ORDER, self.epoch)
        for start in range(0, num, _BLOCK):
            # numbers of this rank's positions
            mine = np.arange(start, min(start + _BLOCK, num), dtype=np.int64)
            positions = self.position + self.rank + mine * self.num_replicas
            indices = positions % self.length
            yield positions, permute(indices, self.length, key) if self.shuffle else indices
