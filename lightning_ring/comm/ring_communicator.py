"""A `Communicator` over send and receive, shared by the backends MPI, Gloo and threads."""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm import exchange, ring
from lightning_ring.comm.calls import (
    HEADER_BYTES,
    check_agreement,
    check_all_to_all,
    check_rank,
    check_sizes,
    contiguous_flat,
    describe,
    header,
    of_tensor,
    sizes_and_dtypes,
)
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work, as_bytes
from lightning_ring.comm.exchange import DIRECT_BYTES
from lightning_ring.comm.late_calls import LateCalls
from lightning_ring.comm.requests import Answer, Requests
from lightning_ring.comm.transport import PointToPoint, Request, Transport
from lightning_ring.comm.waiting import WaitPolicy, nothing
from lightning_ring.errors import CollectiveError

_HEADER_TAG = 1
_CHANNEL_TAGS = (0, 2, 3)


# A choice takes this into account of what went before: a channel that once carried a large tensor
# is long free again.
_REMEMBERED_BYTES = 16 * 1024 * 1024


Started = tuple[Sequence[Request], Callable[[], object]]
"""Messages under way, and what to do once they are over."""


class Channel:
    """A thread, and a `PointToPoint` whose messages have a tag of their own, over a transport that
    channels share.

    ``landing`` is memory of `ring.scratch_bytes`.
    """

    def __init__(self, transport: PointToPoint, tag: int, policy: WaitPolicy) -> None:
        self.thread = CollectiveThread(policy)
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport
        self._tag = tag
        self._landing = torch.empty(0, dtype=torch.uint8)

    @property
    def landing(self) -> Tensor:
        if not self._landing.numel():  # kept: fresh memory costs a page fault for every 4 KiB
            self._landing = torch.empty(ring.scratch_bytes(), dtype=torch.uint8)
        return self._landing

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request:
        return self._transport.isend(tensor, dst, self._tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Request:
        return self._transport.irecv(tensor, src, self._tag)

    def wait(self, requests: Sequence[Any]) -> None:
        self._transport.wait(requests)


class ChannelSelector:
    """Chooses the channel of each collective by the bytes that each was given, a number that all
    ranks know alike.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        # bytes that this channel was given more than the one with the fewest
        self._ahead = [0] * len(channels)

    def next(self, num_bytes: int) -> Channel:
        chosen = self._ahead.index(min(self._ahead))
        self._ahead[chosen] += num_bytes
        fewest = min(self._ahead)
        self._ahead = [min(ahead - fewest, _REMEMBERED_BYTES) for ahead in self._ahead]
        return self._channels[chosen]

    @property
    def first(self) -> Channel:
        return self._channels[0]

    def of_this_thread(self) -> Channel:
        """The channel whose thread calls; the first, if it is another thread."""
        current = threading.current_thread()
        return next(
            (channel for channel in self._channels if channel.thread.is_run_by(current)), self.first
        )


class RingCommunicator(Communicator):
    """Collectives run in threads beside the computation, in the order of the calls: one after
    another in each channel.

    With several channels several are on the wire at a time: while one waits for messages, the
    others fill it. For each, the ranks exchange a header (`calls`), so that diverged calls are an
    error on every rank. It leaves with the call, and arrives while earlier collectives are still
    under way. With ``late_calls``, two ranks send short all-reduces without a header. After an
    error the communicator is broken: what is under way and every later call raise that same error.
    So do those of the other communicators that share its ``policy``.

    ``members`` are the ranks' numbers in the job, for errors. Without ``checked`` no headers are
    exchanged: for what is called by a communicator that has exchanged its own.
    """

    def __init__(
        self,
        transport: Transport,
        policy: WaitPolicy,
        members: Sequence[int] = (),
        checked: bool = True,
        num_channels: int = 1,
    ) -> None:
        self.transport = transport
        self.rank, self.world_size = transport.rank, transport.world_size
        self._policy = policy
        channels = [Channel(transport, tag, policy) for tag in _CHANNEL_TAGS[:num_channels]]
        self._channels = ChannelSelector(channels)
        # in the order in which a collective passes
        self._threads = [channel.thread for channel in channels]
        self._checked = checked
        self._members = list(members) or list(range(transport.world_size))
        transport.while_waiting = self._while_waiting
        self._num_calls = 0
        self.late_calls: LateCalls | None = None  # set on both ranks before the first call
        # of two threads that call, the one announced first also sends first
        self._starting = threading.Lock()
        self._closed = False
        _open.add(self)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(tensor, "all_reduce_")
        ring.check_reducible(flat, op)
        what = of_tensor("all_reduce", flat, name, op.value)

        if exchange.goes_directly(flat, self.world_size):

            def start(tag: int) -> Started:
                return exchange.start_all_reduce_directly(flat, self.transport, op, tag)

            return self._start(what, num_bytes=flat.nbytes, start=start)

        def run(channel: Channel) -> None:
            exchange.all_reduce_(flat, channel, op, channel.landing)

        return self._start(what, run, flat.nbytes)

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(flat, "reduce_scatter_")
        ring.check_reducible(flat, op)
        what = of_tensor("reduce_scatter", flat, name, op.value)

        def run(channel: Channel) -> None:
            exchange.reduce_scatter_(flat, channel, op, channel.landing)

        return self._start(what, run, flat.nbytes)

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        flat = contiguous_flat(flat, "all_gather_")
        what = of_tensor("all_gather", flat, name)
        if flat.nbytes <= DIRECT_BYTES:
            return self._start(what, lambda channel: exchange.all_gather_directly_(flat, channel))
        return self._start(what, lambda channel: ring.all_gather_(flat, channel), flat.nbytes)

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in inputs]
        targets = [as_bytes(contiguous_flat(tensor, "all_to_all")) for tensor in outputs]

        def run(channel: Channel) -> None:
            sizes = torch.zeros(self.world_size, 2 * self.world_size, dtype=torch.int64)
            sizes[self.rank] = sizes_and_dtypes((*inputs, *outputs))
            exchange.exchange_rows(sizes, channel)
            check_sizes(sizes, what)
            exchange.all_to_all(sources, targets, channel)

        return self._start(what, run, alone=True)

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        flat = contiguous_flat(tensor, "broadcast_")
        check_rank(src, self.world_size, "src")
        what = of_tensor("broadcast", flat, name, f"from rank {src}")
        return self._start(
            what, lambda channel: exchange.broadcast_(flat, channel, src), flat.nbytes
        )

    def barrier(self, *, name: str = "") -> None:
        assert self._checked, "the exchange of headers is the barrier"
        self._start(describe("barrier", name=name), nothing).wait()

    def open_requests(self, answer: Answer) -> Requests:
        transports = self.transport.duplicate(self._policy), self.transport.duplicate(self._policy)
        return Requests(transports, self._policy, answer)

    def abandon(self) -> None:
        if not all(thread.idle for thread in self._threads):
            self._policy.fail(CollectiveError("this communicator was replaced by a new one."))
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._policy.error is not None and any(thread.busy for thread in self._threads):
                self.transport.interrupt()
            ended = sum(thread.close() for thread in self._threads) == len(self._threads)
            self.transport.close(broken=self._policy.error is not None or not ended)

    def _start(
        self,
        what: str,
        run: Callable[[Channel], object] = nothing,
        num_bytes: int = 0,
        *,
        start: Callable[[int], Started] | None = None,
        channel: Channel | None = None,
        alone: bool = False,
    ) -> Work:
        """Queue one collective; with one rank nothing is done, unless it does something ``alone``.

        ``start`` sends and receives at once, in the order of the calls, with the tag that it gets;
        ``run`` is called once the ranks have agreed. ``num_bytes`` chooses a channel; collectives
        that must begin in the order of the calls name theirs.
        """
        if self.world_size == 1 and not alone:
            self._policy.raise_if_broken()
            return CompletedWork()
        with self._starting:
            chosen = channel or self._channels.next(num_bytes)
            chosen.thread.check_open(what)
            self._num_calls += 1
            call, late_calls = self._num_calls, self.late_calls
            if late_calls is not None:
                late_calls.begin(call, what)
            steps: list[Callable[[], object]] = []
            if start is not None and late_calls is not None:
                # The tag is unique, so that the order does not matter: the thread sends. Here the
                # caller would wait for Gloo's lock.
                begin = functools.partial(start, late_calls.tag(call, what))
                steps.append(lambda: self._under_way(begin)())
            else:
                if self._checked:
                    steps.append(self._under_way(self._announce(what)))
                if start is not None:
                    steps.append(self._under_way(functools.partial(start, 0)))

            def agree_and_run() -> None:
                for step in steps:
                    step()
                run(chosen)
                if late_calls is not None:
                    late_calls.end(call)

            work = chosen.thread.submit(what, agree_and_run)
            if late_calls is not None:
                work.late = functools.partial(late_calls.tell, call)
            return work

    def _announce(self, what: str) -> Callable[[], Started]:
        """What tells the others what is called, and compares what they have told."""
        call = self._num_calls
        headers = torch.empty(self.world_size, HEADER_BYTES, dtype=torch.uint8)
        headers[self.rank] = header(what)
        return lambda: (
            exchange.start_exchange(headers, self.transport, _HEADER_TAG),
            lambda: check_agreement(headers, call),
        )

    def _under_way(self, start: Callable[[], Started]) -> Callable[[], object]:
        """Begin to send and receive; returns what waits for it and finishes."""
        failure: Exception | None = None
        requests: Sequence[Request] = ()
        finish: Callable[[], object] = nothing
        try:
            requests, finish = start()
        except Exception as error:  # a peer is gone: whoever waits for the work is told
            failure = error

        def wait_and_finish() -> None:
            if failure is not None:
                raise failure
            if requests:
                self.transport.wait(requests)
            finish()

        return wait_and_finish

    def _while_waiting(self, peers: Sequence[int]) -> float:
        thread = self._channels.of_this_thread().thread
        return thread.while_waiting([self._members[peer] for peer in peers])


_open: weakref.WeakSet[RingCommunicator] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """End what is under way: a thread that comes back from Gloo or torch when the interpreter ends
    aborts the process.

    Registered with the import, and so called after the handlers in which a rank of a job waits for
    the others.
    """
    for comm in list(_open):
        if any(thread.busy for thread in comm._threads):
            comm._policy.fail(CollectiveError("this process ends."))
            comm._closed = False  # it may have been closed while its thread was inside a wait
            comm.close()
