"""The ranks of one node: collectives in memory that all of them see, without sockets; for buckets, without copies."""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_ring.comm.agreement import HEADER_BYTES, check_agreement, describe, header
from lightning_ring.comm.backends.shared_memory import collectives as ways
from lightning_ring.comm.backends.shared_memory.regions import Regions
from lightning_ring.comm.backends.shared_memory.rounds import SEGMENT_BYTES, Rounds
from lightning_ring.comm.backends.shared_memory.segment import Bootstrap, NoSharedMemory, share
from lightning_ring.comm.collective_queue import SPIN_SECONDS, CollectiveQueue, Steps
from lightning_ring.comm.communicator import ReduceOp, Work, as_bytes
from lightning_ring.comm.ring import check_reducible
from lightning_ring.comm.ring_communicator import (
    check_all_to_all,
    check_device,
    check_rank,
    check_sizes,
    contiguous_flat,
    pickled,
    sizes_and_dtypes,
    unpickled,
)
from lightning_ring.comm.waiting import Check, Patience
from lightning_ring.comm.wide_sum import sums_halves
from lightning_ring.errors import CollectiveError
from lightning_ring.host.cores import bound_cores

T = TypeVar("T")
SHORT_BYTES = 16 * 1024  # a tensor up to this goes through the slots in one round, wherever it is
_MAX_KNOWN = 4096


class Kind(NamedTuple):
    """The two ways of a collective: `shared_collectives`."""

    name: str
    through_slots: Callable[[Tensor, Rounds, Any], Steps]
    in_place: Callable[[Tensor, int, Regions, Rounds, Any], Steps]


_ALL_REDUCE = Kind("all_reduce", ways.all_reduce_through_slots, ways.all_reduce_in_place)
_REDUCE_SCATTER = Kind("reduce_scatter", ways.reduce_scatter_through_slots, ways.reduce_scatter_in_place)
_ALL_GATHER = Kind("all_gather", ways.all_gather_through_slots, ways.all_gather_in_place)
_BROADCAST = Kind("broadcast", ways.broadcast_through_slots, ways.broadcast_in_place)

_log = logging.getLogger("lightning_ring")


def open_shared_memory(
    bootstrap: Bootstrap,
    patience: Patience | None = None,
    *,
    members: Sequence[int] = (),
    beside: SharedMemoryCommunicator | None = None,
) -> SharedMemoryCommunicator | None:
    """A communicator among the ranks of ``bootstrap``, which share a node; `None`, after one warning, if they cannot.

    Collective.

    Args:
        bootstrap: Used here only: any communicator over just these ranks, or a `StoreBootstrap`.
        patience: How long it waits; several communicators may share one, and then its first error.
        members: The ranks' numbers in the job, for errors; as in ``bootstrap`` if not given.
        beside: A communicator over the same ranks; tensors from either one's `empty` are then in reach of both.
    """
    try:
        maps = share(bootstrap, SEGMENT_BYTES)
    except NoSharedMemory as error:
        if bootstrap.rank == 0:
            _log.warning("The ranks of this node cannot share memory: %s. Tensors travel by messages instead.", error)
        return None
    regions = beside.regions if beside is not None else Regions(bootstrap.rank)
    comm = SharedMemoryCommunicator(bootstrap.rank, maps, patience or Patience(), regions, members)
    comm.fit_waiting()
    return comm


class SharedMemoryCommunicator:
    """CPU tensors among ranks that see ``maps``, one segment of each rank (`share`).

    Tensors from `empty` are reduced in place; any other is copied through the segments. Before each collective the
    ranks compare a digest of what they call, so that diverged calls are an error on every rank. After an error the
    communicator is broken: what is under way and every later call raise that same error.
    """

    def __init__(
        self,
        rank: int,
        maps: Sequence[mmap.mmap],
        patience: Patience,
        regions: Regions,
        members: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.world_size = len(maps)
        self.regions = regions
        self._patience = patience
        self._rounds = Rounds(rank, maps)
        self._members = list(members) or list(range(len(maps)))
        self._queue = CollectiveQueue(patience, self._rounds.reached, self._missing)
        self._known: dict[Any, tuple[str, int]] = {}
        self._num_calls = 0
        self._warned = False

    @property
    def shard_index(self) -> int:
        return self.rank

    @property
    def check(self) -> Check | None:
        """Called about every 20 ms while this rank waits; raises a `RingError` once a peer is known to have failed."""
        return self._patience.check

    @check.setter
    def check(self, check: Check | None) -> None:
        self._patience.check = check

    def fit_waiting(self) -> None:
        """Spin only if every rank has a core: elsewhere it would keep a peer from the one they share. Collective."""
        cores = set().union(*self.all_gather_object(bound_cores()))
        self._queue.spin_seconds = SPIN_SECONDS if len(cores) >= self.world_size else 0.0
        self._queue.spare_cores = len(cores) > self.world_size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the other ranks see too; after one warning ordinary memory, if there is not enough. Blocks."""
        if device.type != "cpu" or numel * dtype.itemsize <= SHORT_BYTES:
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            maps = share(self, numel * dtype.itemsize)
        except NoSharedMemory as error:
            if self.rank == 0 and not self._warned:
                _log.warning("No shared memory for a buffer, which is copied at every use instead: %s.", error)
            self._warned = True
            return torch.empty(numel, dtype=dtype)
        return self.regions.add(maps, dtype)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._submit(_ALL_REDUCE, tensor, op, name)

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._submit(_REDUCE_SCATTER, flat, op, name)

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        return self._submit(_ALL_GATHER, flat, None, name)

    def all_gather(self, tensor: Tensor, *, name: str = "") -> list[Tensor]:
        check_device(tensor, "all_gather")
        what = describe("all_gather", tensor.dtype, f"shape {tuple(tensor.shape)}", name=name)
        rows = tensor.new_empty(self.world_size, tensor.numel())
        rows[self.rank] = tensor.detach().reshape(-1)
        self._run(what, ways.all_gather_through_slots(rows.view(-1), self._rounds))
        return [row.view(tensor.shape) for row in rows]

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = "") -> Work:
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in inputs]
        targets = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in outputs]

        def run() -> Steps:
            sizes = torch.zeros(self.world_size, 2 * self.world_size, dtype=torch.int64)
            sizes[self.rank] = sizes_and_dtypes((*inputs, *outputs))
            yield from ways.exchange_rows(sizes, self._rounds)
            most_bytes = check_sizes(sizes, what)
            yield from ways.all_to_all_through_slots(sources, targets, self._rounds, most_bytes)

        return self._queue.submit(what, self._agreed(what, digest_of(what), run()), background=True)

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        check_rank(src, self.world_size, "src")
        return self._submit(_BROADCAST, tensor, src, name)

    def broadcast_object(self, obj: T, *, src: int = 0) -> T:
        check_rank(src, self.world_size, "src")
        if self.world_size == 1:
            return obj
        message = pickled(obj) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        received: list[Tensor] = []
        what = describe("broadcast_object", f"from rank {src}")
        self._run(what, ways.gather_messages(message, received, self._rounds))
        value = unpickled(received[src], src)
        return obj if self.rank == src else value

    def all_gather_object(self, obj: Any) -> list[Any]:
        received: list[Tensor] = []
        self._run(describe("all_gather_object"), ways.gather_messages(pickled(obj), received, self._rounds))
        return [unpickled(message, rank) for rank, message in enumerate(received)]

    def barrier(self) -> None:
        self._run(describe("barrier"), ways.meet(self._rounds))

    def abandon(self) -> None:
        if not self._queue.idle:
            self._patience.fail(CollectiveError("this communicator was replaced by a new one."))
        self.close()

    def close(self) -> None:
        self._queue.close()

    def _submit(self, kind: Kind, tensor: Tensor, how: ReduceOp | int | None, name: str) -> Work:
        """``how`` is the reduction, or the rank that broadcasts."""
        if (
            tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.is_cpu
            and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        ):
            flat = tensor  # what `contiguous_flat` would give; it takes a third of a short collective's time
        else:
            flat = contiguous_flat(tensor, kind.name + "_")
        what, digest = self._describe(kind.name, flat.dtype, flat.numel(), how, name)
        halves = flat.itemsize == 2 and sums_halves(flat.dtype, how, self.world_size)
        if halves:
            how = ReduceOp.SUM
        short = flat.nbytes <= SHORT_BYTES
        if short:
            body = kind.through_slots(flat, self._rounds, how)
            steps = self._agreed(what, digest, body)
        else:
            steps = self._in_place_if_all_can(what, digest, kind, flat, how)
        if halves:
            steps = _halved_first(flat, steps)
        return self._queue.submit(what, steps, background=not short)

    def _describe(
        self, kind: str, dtype: torch.dtype, numel: int, how: ReduceOp | int | None, name: str
    ) -> tuple[str, int]:
        """Text and digest of a collective, made once: they take longer than a short collective."""
        known = self._known.get((kind, dtype, numel, how, name))
        if known is None:
            details = [dtype, f"{numel} elements"]
            if isinstance(how, ReduceOp):
                check_reducible(torch.empty(0, dtype=dtype), how)
                details.insert(0, how.value)
            elif how is not None:
                details.insert(0, f"from rank {how}")
            what = describe(kind, *details, name=name)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[kind, dtype, numel, how, name] = what, digest_of(what)
        return known

    def _run(self, what: str, body: Steps) -> None:
        self._queue.submit(what, self._agreed(what, digest_of(what), body), background=False).wait()

    def _agreed(self, what: str, digest: int, body: Steps) -> Steps:
        """``body``, whose first round tells the others what is called, and ends it if they call something else."""
        self._num_calls += 1
        call = self._num_calls
        self._rounds.announce(digest, 0)
        yield next(body)
        if not self._rounds.agree():
            yield from self._compare(what, call)
        yield from body

    def _compare(self, what: str, call: int) -> Steps:
        headers = torch.zeros(self.world_size, HEADER_BYTES, dtype=torch.uint8)
        headers[self.rank] = header(what)
        yield from ways.exchange_rows(headers, self._rounds)
        check_agreement(headers, call)

    def _in_place_if_all_can(self, what: str, digest: int, kind: Kind, flat: Tensor, how: Any) -> Steps:
        """As `_agreed`; the first round also tells where the tensors are."""
        self._num_calls += 1
        call = self._num_calls
        rounds, place = self._rounds, self.regions.place(flat)
        rounds.announce(digest, place)
        yield rounds.arrive()
        if not rounds.agree():
            yield from self._compare(what, call)
        if place == 0 or not rounds.same_place():
            yield from kind.through_slots(flat, rounds, how)
        else:
            yield from kind.in_place(flat, place, self.regions, rounds, how)

    def _missing(self, number: int) -> list[int]:
        return [self._members[rank] for rank in self._rounds.missing(number)]


def _halved_first(flat: Tensor, body: Steps) -> Steps:
    flat.mul_(0.5)
    yield from body


def digest_of(what: str) -> int:
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little", signed=True)
