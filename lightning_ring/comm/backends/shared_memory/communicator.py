"""Collectives of the ranks of one node in shared memory; buckets are not copied."""

from __future__ import annotations

import functools
import hashlib
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ring.comm.backends.gloo import open_gloo_transport
from lightning_ring.comm.backends.shared_memory import collectives as shared
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.backends.shared_memory.memory import (
    DIGEST,
    LOCATION,
    SEGMENT_BYTES,
    Bootstrap,
    NoSharedMemory,
    Regions,
    Rounds,
    share,
)
from lightning_ring.comm.calls import (
    HEADER_BYTES,
    check_agreement,
    check_all_to_all,
    check_rank,
    check_sizes,
    contiguous_flat,
    describe,
    header,
    sizes_and_dtypes,
)
from lightning_ring.comm.collective_queue import SPIN_SECONDS, CollectiveQueue, Steps
from lightning_ring.comm.communicator import Communicator, ReduceOp, Work, as_bytes
from lightning_ring.comm.exchange import sums_halves
from lightning_ring.comm.requests import Answer, Requests
from lightning_ring.comm.ring import check_reducible
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import CollectiveError
from lightning_ring.host.cores import bound_cores

SHORT_BYTES = 16 * 1024  # a tensor up to this goes through the slots in one round, wherever it is


class SharedCollective(NamedTuple):
    """A collective of any tensors, and of tensors that all ranks see."""

    name: str
    through_slots: Callable[[Tensor, Rounds, Any], Steps]
    in_place: Callable[[Tensor, int, Regions, Rounds, Any], Steps]


_ALL_REDUCE = SharedCollective(
    "all_reduce", shared.all_reduce_through_slots, shared.all_reduce_in_place
)
_REDUCE_SCATTER = SharedCollective(
    "reduce_scatter", shared.reduce_scatter_through_slots, shared.reduce_scatter_in_place
)
_ALL_GATHER = SharedCollective(
    "all_gather", shared.all_gather_through_slots, shared.all_gather_in_place
)
_BROADCAST = SharedCollective(
    "broadcast", shared.broadcast_through_slots, shared.broadcast_in_place
)

_log = logging.getLogger("lightning_ring")


def open_shared_memory(
    bootstrap: Bootstrap,
    policy: WaitPolicy | None = None,
    *,
    members: Sequence[int] = (),
    beside: SharedMemoryCommunicator | None = None,
    kept: KeptMemory | None = None,
) -> SharedMemoryCommunicator | None:
    """A communicator among the ranks of ``bootstrap``, which share a node; `None`, after one
    warning, if they cannot share memory. Collective.

    ``bootstrap`` is used here only. ``members`` are the ranks' numbers in the job, for errors. With
    a communicator ``beside`` it, over the same ranks, both see tensors from the `empty` of either.
    ``kept`` lends the memory of `empty`, and outlives the communicator.
    """
    try:
        maps = share(bootstrap, SEGMENT_BYTES)
    except NoSharedMemory as error:
        if bootstrap.rank == 0:
            _log.warning(
                "The ranks of this node cannot share memory: %s. Tensors travel by "
                "messages instead.",
                error,
            )
        return None
    regions = beside.regions if beside is not None else Regions(bootstrap.rank)
    comm = SharedMemoryCommunicator(
        bootstrap.rank, maps, policy or WaitPolicy(), regions, members, kept
    )
    comm.fit_waiting()
    return comm


class SharedMemoryCommunicator(Communicator):
    """CPU tensors among ranks that see ``maps``, one segment of each rank (`share`).

    Tensors from `empty` are reduced in place; any other is copied through the segments. The ranks
    compare a digest of each call: diverged calls are an error on every rank. After an error the
    communicator is broken: every call raises that same error.
    """

    def __init__(
        self,
        rank: int,
        maps: Sequence[mmap.mmap],
        policy: WaitPolicy,
        regions: Regions,
        members: Sequence[int],
        kept: KeptMemory | None,
    ) -> None:
        self.rank = rank
        self.world_size = len(maps)
        self.regions = regions
        self._share = kept.share if kept is not None else share
        self._policy = policy
        self._rounds = Rounds(rank, maps)
        self._members = list(members) or list(range(len(maps)))
        self._queue = CollectiveQueue(policy, self._rounds.reached, self._missing)
        self._num_calls = 0
        self._warned = False

    def fit_waiting(self) -> None:
        """Spin only if every rank has a core of its own. Collective."""
        cores = set().union(*self.all_gather_object(bound_cores()))
        self._queue.spin_seconds = SPIN_SECONDS if len(cores) >= self.world_size else 0.0
        self._queue.spare_cores = len(cores) > self.world_size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Shared memory; ordinary memory, after one warning, if there is not enough. Blocks."""
        if device.type != "cpu" or numel * dtype.itemsize <= SHORT_BYTES:
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            maps = self._share(self, numel * dtype.itemsize)
        except NoSharedMemory as error:
            if self.rank == 0 and not self._warned:
                _log.warning(
                    "No shared memory for a buffer, which is copied at every use instead: %s.",
                    error,
                )
            self._warned = True
            return torch.empty(numel, dtype=dtype)
        return self.regions.add(maps, dtype)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._submit(_ALL_REDUCE, tensor, op, name)

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._submit(_REDUCE_SCATTER, flat, op, name)

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        return self._submit(_ALL_GATHER, flat, None, name)

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in inputs]
        targets = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in outputs]

        def run() -> Steps:
            sizes = torch.zeros(self.world_size, 2 * self.world_size, dtype=torch.int64)
            sizes[self.rank] = sizes_and_dtypes((*inputs, *outputs))
            yield from shared.exchange_rows(sizes, self._rounds)
            most_bytes = check_sizes(sizes, what)
            yield from shared.all_to_all_through_slots(sources, targets, self._rounds, most_bytes)

        return self._queue.submit(what, self._agreed(what, digest_of(what), run()), background=True)

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        check_rank(src, self.world_size, "src")
        return self._submit(_BROADCAST, tensor, src, name)

    def open_requests(self, answer: Answer) -> Requests:
        transports = open_gloo_transport(self._policy), open_gloo_transport(self._policy)
        return Requests(transports, self._policy, answer)

    def abandon(self) -> None:
        if not self._queue.idle:
            self._policy.fail(CollectiveError("this communicator was replaced by a new one."))
        self.close()

    def close(self) -> None:
        self._queue.close()

    def _submit(
        self,
        collective: SharedCollective,
        tensor: Tensor,
        operand: ReduceOp | int | None,
        name: str,
    ) -> Work:
        """``operand`` is the reduction, or the rank that broadcasts."""
        if (
            tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.is_cpu
            and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        ):
            # As `contiguous_flat`, which takes a third of a short collective's time.
            flat = tensor
        else:
            flat = contiguous_flat(tensor, collective.name + "_")
        what, digest = _described(collective.name, flat.dtype, flat.numel(), operand, name)
        halves = flat.itemsize == 2 and sums_halves(flat.dtype, operand, self.world_size)
        if halves:
            operand = ReduceOp.SUM
        short = flat.nbytes <= SHORT_BYTES
        location = 0 if short else self.regions.location(flat)
        if short:
            body = collective.through_slots(flat, self._rounds, operand)
        else:
            body = self._in_place_if_all_can(collective, flat, location, operand)
        steps = self._agreed(what, digest, body, location)
        if halves:
            steps = _halved_first(flat, steps)
        return self._queue.submit(what, steps, background=not short)

    def _agreed(self, what: str, digest: int, body: Steps, location: int = 0) -> Steps:
        """``body``, whose first round compares the calls, and announces the ``location``."""
        self._num_calls += 1
        call = self._num_calls
        self._rounds.announce(digest, location)
        yield next(body)
        if not self._rounds.all_wrote(DIGEST):
            yield from self._compare(what, call)
        yield from body

    def _compare(self, what: str, call: int) -> Steps:
        headers = torch.zeros(self.world_size, HEADER_BYTES, dtype=torch.uint8)
        headers[self.rank] = header(what)
        yield from shared.exchange_rows(headers, self._rounds)
        check_agreement(headers, call)

    def _in_place_if_all_can(
        self, collective: SharedCollective, flat: Tensor, location: int, operand: Any
    ) -> Steps:
        yield self._rounds.arrive()
        if location == 0 or not self._rounds.all_wrote(LOCATION):
            yield from collective.through_slots(flat, self._rounds, operand)
        else:
            yield from collective.in_place(flat, location, self.regions, self._rounds, operand)

    def _missing(self, number: int) -> list[int]:
        return [self._members[rank] for rank in self._rounds.missing(number)]


@functools.lru_cache(maxsize=4096)
def _described(
    kind: str, dtype: torch.dtype, numel: int, operand: ReduceOp | int | None, name: str
) -> tuple[str, int]:
    """Text and digest of a collective, cached: making them is slower than a short collective."""
    details = [dtype, f"{numel} elements"]
    if isinstance(operand, ReduceOp):
        check_reducible(torch.empty(0, dtype=dtype), operand)
        details.insert(0, operand.value)
    elif operand is not None:
        details.insert(0, f"from rank {operand}")
    what = describe(kind, *details, name=name)
    return what, digest_of(what)


def _halved_first(flat: Tensor, body: Steps) -> Steps:
    flat.mul_(0.5)
    yield from body


def digest_of(what: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(what.encode(), digest_size=8).digest(), "little", signed=True
    )
