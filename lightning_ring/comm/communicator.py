"""What every backend offers: a fixed group of ranks that exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

T = TypeVar("T")


class ReduceOp(Enum):
    """How the ranks' values become one. AVG divides by the world size; on integers it truncates toward zero, and
    the sum has to fit the dtype: it wraps around otherwise, as torch's own sums do."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and takes a twentieth of a short collective

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@runtime_checkable
class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result may be read (on CUDA: until the current stream is ordered after it).

        Raises:
            CollectiveError: It did not finish within the communicator's timeout, or failed.
            PeerFailedError: Another rank failed meanwhile.
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks, never raises."""
        ...


class Communicator(Protocol):
    """A fixed group of ranks that exchange tensors.

    Every method is collective: all ranks call it in the same order, with tensors of equal dtype and matching sizes.
    Methods that return a `Work` are asynchronous: the tensors handed in belong to the communicator until `Work.wait`.
    Tensors are contiguous and live on a device that the backend serves; those of two collectives that are under way
    share no memory. The optional ``name`` of a collective (such as ``"bucket 3"``) appears in errors and traces.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def shard_index(self) -> int:
        """Which of the ``world_size`` shards (`shard_bounds`) `reduce_scatter_` leaves on this rank.

        The rank itself on one ring; where rings are nested it follows from who shares a node with whom.
        """
        ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised 1-D memory that this communicator moves fastest. All ranks ask for the same, in one order.

        Any other tensor can be handed to the collectives as well. The memory is given back with its last tensor.
        """
        ...

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        """Reduce ``tensor`` (any shape) over all ranks, in place. All ranks end with the same bits."""
        ...

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        """Reduce ``flat`` (1-D, any length); shard `shard_index` then holds the result, the rest is scratch."""
        ...

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        """Fill ``flat`` (1-D, any length) from the ranks' shards of it (`shard`): the second half of an all-reduce."""
        ...

    def all_gather(self, tensor: Tensor, *, name: str = "") -> list[Tensor]:
        """Every rank's ``tensor`` (same dtype and shape everywhere), by rank. Blocks."""
        ...

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = "") -> Work:
        """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with what it has for this rank (sizes may differ)."""
        ...

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        """Replace ``tensor`` by rank ``src``'s, in place."""
        ...

    def broadcast_object(self, obj: T, *, src: int = 0) -> T:
        """Rank ``src``'s picklable ``obj``, on every rank. Blocks."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable ``obj``, by rank. Blocks."""
        ...

    def barrier(self) -> None:
        """Block until every rank is here."""
        ...

    def abandon(self) -> None:
        """Close without waiting: what is under way ends with an error, where its peers may never take part in it."""
        ...

    def close(self) -> None:
        """Wait for what is under way, then release threads and groups. Not collective; calling it twice is fine."""
        ...


def shard_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """First and one-past-last index of ``rank``'s shard of ``numel`` elements.

    The first ``numel % world_size`` shards are one element longer, as in `torch.tensor_split`; shards may be empty.
    """
    size, longer = divmod(numel, world_size)
    start = rank * size + min(rank, longer)
    return start, start + size + (rank < longer)


def shard(flat: Tensor, world_size: int, rank: int) -> Tensor:
    """View of ``rank``'s shard of the 1-D tensor ``flat``."""
    start, stop = shard_bounds(flat.numel(), world_size, rank)
    return flat[start:stop]


class CompletedWork:
    """A `Work` that was over when it was made."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as a 1-D uint8 tensor (``tensor`` is contiguous), for transports that know no dtype."""
    return tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
