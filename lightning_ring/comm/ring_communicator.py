"""A whole `Communicator` over send and receive: what the MPI and the thread backend share."""

from __future__ import annotations

import atexit
import ctypes
import functools
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_ring.comm import exchange, ring, wide_sum
from lightning_ring.comm.agreement import HEADER_BYTES, check_agreement, describe, header
from lightning_ring.comm.communicator import CompletedWork, ReduceOp, Work, as_bytes
from lightning_ring.comm.lane import Lane, Lanes
from lightning_ring.comm.waiting import Check, Patience
from lightning_ring.errors import CollectiveError, ConfigurationError

T = TypeVar("T")
DIRECT_BYTES = 16 * 1024  # per rank; up to this an all-reduce is one message to everybody
_HEADER_TAG = 1
_LANE_TAGS = (0, 2, 3)
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Transport(ring.PointToPoint, Protocol):
    """A `PointToPoint` whose waits can be ended from outside."""

    while_waiting: Callable[[Sequence[int]], float]
    """Called with the ranks waited for, again and again during a wait, which goes on for as many more seconds as it
    returns; what it raises ends the wait."""

    def interrupt(self) -> None:
        """End the waits of other threads that ask `while_waiting` too seldom; no message travels after that."""
        ...

    def close(self, broken: bool) -> None: ...


class RingCommunicator:
    """Collectives run in threads beside the computation, in the order of the calls: one after another in each lane.

    With several lanes several are on the wire at a time: while one waits for messages, the others fill it.
    For each, the ranks exchange a header (`agreement`), so that diverged calls are an error on every rank. It leaves
    with the call, and arrives while earlier collectives are still under way. After an error the communicator is broken:
    what is under way and every later call raise that same error. So do those of the other communicators that share its
    ``patience``.

    ``members`` are the ranks' numbers in the job, for errors. Without ``checked`` no headers are exchanged: for what is
    called by a communicator that has exchanged its own.
    """

    def __init__(
        self,
        transport: Transport,
        patience: Patience,
        members: Sequence[int] = (),
        checked: bool = True,
        num_lanes: int = 1,
    ) -> None:
        self.transport = transport
        self._patience = patience
        self._lanes = Lanes([Lane(transport, tag, patience) for tag in _LANE_TAGS[:num_lanes]])
        self._threads = self._lanes.threads  # in the order in which a collective passes through them
        self._checked = checked
        self._members = list(members) or list(range(transport.world_size))
        transport.while_waiting = self._while_waiting
        self._num_calls = 0
        self._starting = threading.Lock()  # of two threads that call, the one announced first also sends first
        self._closed = False
        _open.add(self)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def shard_index(self) -> int:
        return self.rank

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    @property
    def check(self) -> Check | None:
        """Called about every 20 ms while this rank waits; raises a `RingError` once a peer is known to have failed."""
        return self._patience.check

    @check.setter
    def check(self, check: Check | None) -> None:
        self._patience.check = check

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(tensor, "all_reduce_")
        ring.check_reducible(flat, op)
        what = describe("all_reduce", op.value, flat.dtype, f"{flat.numel()} elements", name=name)
        if flat.nbytes * (self.world_size - 1) <= DIRECT_BYTES:
            return self._start(what, lambda lane: exchange.all_reduce_directly_(flat, lane, op))
        way = wide_sum.all_reduce_ if wide_sum.wants_wide_sum(flat.dtype, op) else ring.all_reduce_
        return self._start(what, lambda lane: way(flat, lane, op, scratch=lane.landing), flat.nbytes)

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(flat, "reduce_scatter_")
        ring.check_reducible(flat, op)
        what = describe("reduce_scatter", op.value, flat.dtype, f"{flat.numel()} elements", name=name)
        way = wide_sum.reduce_scatter_ if wide_sum.wants_wide_sum(flat.dtype, op) else ring.reduce_scatter_
        return self._start(what, lambda lane: way(flat, lane, op, scratch=lane.landing), flat.nbytes)

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        flat = contiguous_flat(flat, "all_gather_")
        what = describe("all_gather", flat.dtype, f"{flat.numel()} elements", name=name)
        return self._start(what, lambda lane: ring.all_gather_(flat, lane), flat.nbytes)

    def all_gather(self, tensor: Tensor, *, name: str = "") -> list[Tensor]:
        check_device(tensor, "all_gather")
        what = describe("all_gather", tensor.dtype, f"shape {tuple(tensor.shape)}", name=name)
        rows = tensor.new_empty(self.world_size, tensor.numel())
        rows[self.rank] = tensor.detach().reshape(-1)
        self._start(what, lambda lane: ring.all_gather_(rows.view(-1), lane), rows.nbytes).wait()
        return [row.view(tensor.shape) for row in rows]

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = "") -> Work:
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in inputs]
        targets = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in outputs]

        def run(lane: Lane) -> None:
            sizes = torch.zeros(self.world_size, 2 * self.world_size, dtype=torch.int64)
            sizes[self.rank] = sizes_and_dtypes((*inputs, *outputs))
            check_sizes(exchange.exchange_rows(sizes, lane), what)
            exchange.all_to_all(sources, targets, lane)

        return self._start(what, run, alone=True)

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        flat = contiguous_flat(tensor, "broadcast_")
        check_rank(src, self.world_size, "src")
        what = describe("broadcast", f"from rank {src}", flat.dtype, f"{flat.numel()} elements", name=name)
        return self._start(what, lambda lane: exchange.broadcast_(flat, lane, src), flat.nbytes)

    def broadcast_object(self, obj: T, *, src: int = 0) -> T:
        if self.world_size == 1:
            return obj
        check_rank(src, self.world_size, "src")
        message = pickled(obj) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([message.numel()])
        received: list[Tensor] = []

        def run(lane: Lane) -> None:
            exchange.broadcast_(size, lane, src)
            received.append(message if self.rank == src else torch.empty(int(size), dtype=torch.uint8))
            exchange.broadcast_(received[0], lane, src)

        self._start(describe("broadcast_object", f"from rank {src}"), run).wait()
        value = unpickled(received[0], src)
        return obj if self.rank == src else value

    def all_gather_object(self, obj: Any) -> list[Any]:
        if self.world_size == 1:
            return [obj]
        message = pickled(obj)
        received: list[Tensor] = []

        def run(lane: Lane) -> None:
            sizes = torch.zeros(self.world_size, 1, dtype=torch.int64)
            sizes[self.rank] = message.numel()
            exchange.exchange_rows(sizes, lane)
            received.extend(torch.empty(int(size), dtype=torch.uint8) for size in sizes)
            exchange.all_to_all([message] * self.world_size, received, lane)

        self._start(describe("all_gather_object"), run).wait()
        return [unpickled(message, rank) for rank, message in enumerate(received)]

    def barrier(self) -> None:
        assert self._checked, "the exchange of headers is the barrier"
        self._start(describe("barrier"), _nothing).wait()

    def abandon(self) -> None:
        if not all(thread.idle for thread in self._threads):
            self._patience.fail(CollectiveError("this communicator was replaced by a new one."))
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._patience.error is not None and any(thread.busy for thread in self._threads):
                self.transport.interrupt()
            ended = sum(thread.close() for thread in self._threads) == len(self._threads)
            self.transport.close(broken=self._patience.error is not None or not ended)

    def _start(
        self,
        what: str,
        run: Callable[[Lane], object],
        num_bytes: int = 0,
        *,
        lane: Lane | None = None,
        alone: bool = False,
    ) -> Work:
        """Queue one collective; with one rank nothing is done, unless it does something ``alone``.

        ``num_bytes`` is what tells the lanes apart. What has to begin in the order of the calls names its ``lane``.
        """
        if self.world_size == 1 and not alone:
            self._patience.raise_if_broken()
            return CompletedWork()
        with self._starting:
            lane = lane or self._lanes.next(num_bytes)
            lane.thread.check_open(what)
            agree = self._announce(what) if self._checked else _nothing
            return lane.thread.submit(what, functools.partial(_agree_and_run, agree, run, lane))

    def _announce(self, what: str) -> Callable[[], None]:
        """Tell the others what is called; returns what waits until they have told it too, and compares."""
        self._num_calls += 1
        call = self._num_calls
        headers = torch.empty(self.world_size, HEADER_BYTES, dtype=torch.uint8)
        headers[self.rank] = header(what)
        try:
            requests = exchange.start_exchange(headers, self.transport, _HEADER_TAG)
        except Exception as error:  # a peer is gone: whoever waits for the work is told
            return functools.partial(_raise, error)

        def agree() -> None:
            if requests:
                self.transport.wait(requests)
            check_agreement(headers, call)

        return agree

    def _while_waiting(self, peers: Sequence[int]) -> float:
        thread = self._lanes.of_this_thread().thread
        return thread.while_waiting([self._members[peer] for peer in peers])


_open: weakref.WeakSet[RingCommunicator] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """End what is under way: a thread that comes back from Gloo or torch when the interpreter ends aborts the process.

    Registered with the import, and so called after the handlers in which a rank of a job waits for the others.
    """
    for comm in list(_open):
        if any(thread.busy for thread in comm._threads):
            comm._patience.fail(CollectiveError("this process ends."))
            comm._closed = False  # it may have been closed while its thread was inside a wait
            comm.close()


def pickled(obj: Any) -> Tensor:
    """``obj`` as uint8, or the error of pickling it, so that all ranks learn of it and none waits for ever."""
    try:
        message = pickle.dumps((True, obj))
    except Exception as error:
        message = pickle.dumps((False, f"{type(error).__name__}: {error}"))
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpickled(message: Tensor, src: int) -> Any:
    """
    Raises:
        CollectiveError: Rank ``src`` could not pickle its object.
    """
    good, obj = pickle.loads(ctypes.string_at(message.data_ptr(), message.numel()))
    if not good:
        raise CollectiveError(f"rank {src} tried to send an object that cannot be pickled: {obj}. Send plain values.")
    return obj


def check_rank(rank: int, world_size: int, argument: str) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"{argument}={rank}, but ranks go from 0 to {world_size - 1}.")


def check_all_to_all(inputs: Sequence[Tensor], outputs: Sequence[Tensor], world_size: int, what: str) -> None:
    if len(inputs) != world_size or len(outputs) != world_size:
        raise ConfigurationError(
            f"{what}: {len(inputs)} inputs and {len(outputs)} outputs for {world_size} ranks; give one of each a rank."
        )


def sizes_and_dtypes(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor its bytes and its dtype, as one number; 0 for an empty one, whatever its dtype."""
    return torch.tensor(
        [tensor.nbytes << 8 | _DTYPES.index(tensor.dtype) if tensor.numel() else 0 for tensor in tensors]
    )


def check_sizes(sizes: Tensor, what: str) -> int:
    """``sizes``: one row per rank, `sizes_and_dtypes` of its inputs, then of its outputs. Returns the most bytes.

    Raises:
        CollectiveError: They differ; the message is the same on every rank.
    """
    world_size = sizes.shape[0]
    sent, expected = sizes[:, :world_size], sizes[:, world_size:].t()
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        source, target = wrong[0]
        raise CollectiveError(
            f"{what}: rank {source} sends {_in_words(sent[source, target])} to rank {target}, which expects "
            f"{_in_words(expected[source, target])} ({len(wrong)} of {world_size**2} pairs differ). Exchange the sizes "
            "first, and use one dtype."
        )
    return int(sizes.max()) >> 8


def _in_words(size_and_dtype: Tensor) -> str:
    num_bytes, dtype = int(size_and_dtype) >> 8, _DTYPES[int(size_and_dtype) & 0xFF]
    return f"{num_bytes} bytes" + (f" of {str(dtype).removeprefix('torch.')}" if num_bytes else "")


def check_device(tensor: Tensor, method: str) -> None:
    if tensor.device.type != "cpu":
        raise ConfigurationError(f"{method}: this backend moves CPU tensors, not {tensor.device}. Use NCCL for CUDA.")


def contiguous_flat(tensor: Tensor, method: str) -> Tensor:
    check_device(tensor, method)
    if not tensor.is_contiguous():
        raise ConfigurationError(f"{method} works in place and needs a contiguous tensor; this one is a strided view.")
    if tensor.is_conj() or tensor.is_neg():  # its memory holds other numbers than it shows
        raise ConfigurationError(
            f"{method} works in place, and this tensor is a conjugate or negative view of another one. Give it "
            "tensor.resolve_conj().resolve_neg()."
        )
    return tensor.detach().view(-1)


def _agree_and_run(agree: Callable[[], object], run: Callable[[Lane], object], lane: Lane) -> None:
    agree()
    run(lane)


def _nothing(*_: object) -> None:
    return None


def _raise(error: Exception) -> None:
    raise error
