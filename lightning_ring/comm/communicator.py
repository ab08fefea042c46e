"""The interface of every backend: a fixed group of ranks that exchange tensors."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from lightning_ring.comm import sealed
from lightning_ring.comm.calls import (
    check_all_to_all,
    check_rank,
    check_sizes,
    describe,
    sizes_and_dtypes,
)
from lightning_ring.comm.host_copy import HostCopy, on_host
from lightning_ring.comm.waiting import poll_until
from lightning_ring.errors import CollectiveError, ConfigurationError

if TYPE_CHECKING:
    from lightning_ring.comm.requests import Requests

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size

T = TypeVar("T")


class ReduceOp(Enum):
    """How the ranks' values become one. AVG divides by the world size; on integers it truncates
    toward zero, and the sum has to fit the dtype."""

    # Enum's own takes a twentieth of a short collective.
    __hash__ = object.__hash__

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@runtime_checkable
class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result may be read (on CUDA: until the current stream is ordered after
        it).

        Raises:
            CollectiveError: It did not finish within the communicator's timeout, or failed.
            PeerFailedError: Another rank failed meanwhile.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks, never raises."""


class Communicator(Protocol):
    """A fixed group of ranks that exchange tensors.

    A backend subclasses it, sets `rank` and `world_size`, and writes the four asynchronous
    collectives and `close`. It overrides another method if its library has something better.

    Every method is collective: all ranks call it in the same order, with tensors of equal dtype and
    matching sizes. Methods that return a `Work` are asynchronous: the tensors handed in belong to
    the communicator until `Work.wait`. Tensors are contiguous and live on a device that the backend
    serves; those of two collectives that are under way share no memory. The optional ``name`` of a
    collective (such as ``"bucket 3"``) appears in errors and traces. Ranks whose names differ get
    an error. Objects and barriers travel as CPU tensors.

    Attributes:
        rank: This rank, from 0.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int

    # --- written by a backend

    @abstractmethod
    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        """Reduce ``tensor`` (any shape) in place. All ranks end with the same bits."""

    @abstractmethod
    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        """Reduce ``flat`` (1-D, any length); shard `shard_index` then holds the result, the rest
        is scratch.
        """

    @abstractmethod
    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        """Fill ``flat`` (1-D, any length) from the ranks' shards of it (`shard`)."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        """Replace ``tensor`` by rank ``src``'s, in place."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, then release threads and groups. Not collective; calling
        it twice is fine.
        """

    # --- written over those

    @property
    def shard_indices(self) -> Sequence[int]:
        """By rank, the index of the shard (`shard_bounds`) that `reduce_scatter_` leaves there.

        On one ring it is the rank itself.
        """
        return range(self.world_size)

    @property
    def shard_index(self) -> int:
        """This rank's entry of `shard_indices`."""
        return self.shard_indices[self.rank]

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised 1-D memory that this communicator moves fastest. It is given back with its
        last tensor.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, tensor: Tensor, *, name: str = "") -> list[Tensor]:
        """Every rank's ``tensor`` (same dtype and shape everywhere), by rank. Blocks."""
        rows = tensor.new_empty(self.world_size, tensor.numel())
        rows[self.shard_index] = tensor.detach().reshape(-1)
        # Ranks whose shapes differ get an error.
        shape = f"shape {tuple(tensor.shape)}"
        self.all_gather_(rows.view(-1), name=f"{name}, {shape}" if name else shape).wait()
        return [rows[index].view(tensor.shape) for index in self.shard_indices]

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` with what it has for this rank
        (sizes may differ).

        This one is written over `all_gather`: each rank receives everything, and it blocks.
        """
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sizes = torch.stack(
            self.all_gather(sizes_and_dtypes((*inputs, *outputs)), name=f"sizes of {what}")
        )
        check_sizes(sizes, what)
        num_bytes = sizes[:, : self.world_size] >> 8  # [source, target]
        sent = torch.zeros(int(num_bytes.sum(1).max()), dtype=torch.uint8, device=inputs[0].device)
        torch.cat(
            [as_bytes(tensor) for tensor in inputs], out=sent[: int(num_bytes[self.rank].sum())]
        )
        for source, row in enumerate(self.all_gather(sent, name=what)):
            start = int(num_bytes[source, : self.rank].sum())
            target = as_bytes(outputs[source])
            target.copy_(row[start : start + target.numel()])
        return CompletedWork()

    @property
    def is_nested(self) -> bool:
        """Whether ranks of a node reduce among themselves first."""
        return False

    def average_by(
        self, flat: Tensor, average: Callable[[Tensor, Communicator], Work], *, name: str = ""
    ) -> Work:
        """Average 1-D ``flat`` in place over all ranks, in the caller's way between nodes.

        ``average(part, group)`` averages ``part`` over the ranks of ``group``, and returns its
        `Work`. On one ring these are ``flat`` and all ranks. On nested rings they are this rank's
        part of the node's average and its peers on the other nodes; ``average`` then runs in
        another thread, one call after another.
        """
        return average(flat, self)

    def broadcast_object(self, obj: T, *, src: int = 0, name: str = "") -> T:
        """Rank ``src``'s picklable ``obj``, on every rank. Blocks."""
        check_rank(src, self.world_size, "src")
        if self.world_size == 1:
            return obj
        message = _pickled(obj if self.rank == src else None)
        size = torch.tensor([message.numel()])
        self.broadcast_(size, src=src, name=f"size of {name or 'an object'}").wait()
        if self.rank != src:
            message = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast_(message, src=src, name=name or "object").wait()
        value = _unpickled(message, src)
        return obj if self.rank == src else value

    def all_gather_object(self, obj: Any, *, name: str = "") -> list[Any]:
        """Every rank's picklable ``obj``, by rank. Blocks."""
        if self.world_size == 1:
            return [obj]
        message = _pickled(obj)
        by_rank = self.all_gather(
            torch.tensor([message.numel()]), name=f"sizes of {name or 'objects'}"
        )
        sizes = [int(size) for size in by_rank]
        padded = message.new_zeros(max(sizes))
        padded[: message.numel()] = message
        rows = self.all_gather(padded, name=name or "objects")
        return [
            _unpickled(row[:size], rank)
            for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def barrier(self, *, name: str = "") -> None:
        """Block until every rank is here."""
        self.all_reduce_(torch.zeros(1), name=f"barrier {name}".rstrip()).wait()

    def copy_to_host(self, tensor: Tensor) -> HostCopy:
        """Start a copy of ``tensor``. Not collective."""
        return HostCopy(tensor, self.wait_until)

    def read(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the host. Not collective.

        A read by other means (``item()``, ``tolist()``, ``cpu()``) waits inside the driver, and
        does not learn that another rank failed.
        """
        return tensor if on_host(tensor) else self.copy_to_host(tensor).value()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Block until ``reached()``. Raises as `Work.wait`. Not collective."""
        poll_until(reached, lambda: None)

    def open_requests(self, answer: Callable[[int, Tensor], Tensor]) -> Requests:
        """Let ranks ask each other at any time, in any order, after `Requests.start`. Collective.

        ``answer(peer, question)`` runs in threads of this rank. Questions travel on the host.
        """
        raise ConfigurationError(
            f"{type(self).__name__} carries collectives alone, and no questions between two ranks."
        )

    def abandon(self) -> None:
        """Close without waiting: what is under way ends with an error."""
        self.close()


def shard_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """First and one-past-last index of ``rank``'s shard of ``numel`` elements.

    The first ``numel % world_size`` shards are one element longer, as in `torch.tensor_split`;
    shards may be empty.
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

    __slots__ = ()

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class ChainedWork:
    """A `Work` followed by ``steps``, taken once each in the thread that waits first.

    A step may start and wait for further collectives.
    """

    __slots__ = ("_steps", "_work")

    def __init__(self, work: Work, *steps: Callable[[], object]) -> None:
        self._work = work
        self._steps = list(steps)

    def wait(self) -> None:
        self._work.wait()
        while self._steps:
            self._steps.pop(0)()

    def advance(self) -> None:
        advance(self._work)

    def done(self) -> bool:
        return not self._steps and self._work.done()


def advance(work: Work) -> None:
    """Have ``work`` start its next collective, if it consists of several. Collective.

    Called for several works first, it keeps the wire busy while their results are decoded.
    """
    if (go_on := getattr(work, "advance", None)) is not None:
        go_on()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of contiguous ``tensor`` as a 1-D uint8 tensor."""
    return (
        tensor.detach().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, which compare by their bits: NaN equals NaN."""
    return (
        tensor.view(_INTEGERS[tensor.element_size()])
        if tensor.element_size() in _INTEGERS
        else tensor
    )


def _pickled(obj: Any) -> Tensor:
    """``obj`` as uint8, or the error of pickling it, so that all ranks learn of it."""
    try:
        message = sealed.dumps((True, obj))
    except Exception as error:
        message = sealed.dumps((False, f"{type(error).__name__}: {error}"))
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _unpickled(message: Tensor, src: int) -> Any:
    good, obj = sealed.loads(ctypes.string_at(message.data_ptr(), message.numel()))
    if not good:
        raise CollectiveError(
            f"rank {src} tried to send an object that cannot be pickled: {obj}. Send plain values."
        )
    return obj
