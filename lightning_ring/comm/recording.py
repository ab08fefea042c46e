"""A `Communicator` that reports the times of its collectives to listeners."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.errors import RingError

_log = logging.getLogger("lightning_ring")

T = TypeVar("T")
_NUMBERS = re.compile(r"^backward \d+ \(step \d+\): ")  # a record has the time, and a chart one channel a bucket


@dataclass(slots=True)
class CollectiveRecord:
    """One collective, as its caller saw it. Times are those of `time.perf_counter`, in seconds.

    The caller loses ``returned - called`` and ``waited_until - waited_from``; the rest of the time until ``ended`` is
    hidden under what it computes. Collectives of one communicator begin in the order of their calls, but one may be
    called, and over Gloo also be on the wire, before the last one has ended, and then even end before it. Whoever adds
    up takes of each what comes after the end of those before it (`monitor.step_window` does), so that no moment counts
    twice; when an overlapping one began on the wire is not known.

    On CUDA ``ended`` is `None`. ``events`` tell when the stream that called it came to it, and when it was over;
    ``wait_event`` when the stream that waited for it came to that.
    """

    name: str  # the caller's, such as "bucket 3 (...)", without the number of the backward
    kind: str  # "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "broadcast"
    nbytes: int  # of this rank's tensor, as it travels
    called: float
    returned: float = 0.0
    waited_from: float = 0.0
    waited_until: float = 0.0
    ended: float | None = None  # when it was over, if the work has such an attribute; else when its caller had waited
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    wait_event: torch.cuda.Event | None = None


Listener = Callable[[CollectiveRecord], None]


class RecordedCommunicator(Communicator):
    """``comm``, whose collectives are told to ``listeners`` once they were waited for, in the thread that waited.

    Costs four clock reads a collective, on CUDA three events; without listeners nothing. Collectives that block are not
    recorded. The list may change while training goes on; a listener that raises is taken off it. ``label`` begins the
    names of all collectives that are recorded: ranks that confuse two of such communicators get an error.
    """

    def __init__(self, comm: Communicator, listeners: list[Listener], label: str = "") -> None:
        self._comm = comm
        self._label = label
        self.rank, self.world_size = comm.rank, comm.world_size
        self._listeners = listeners
        self._side: torch.cuda.Stream | None = None

    @property
    def shard_indices(self) -> Sequence[int]:
        return self._comm.shard_indices

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._comm.empty(numel, dtype, device)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        record = self._called("all_reduce", tensor, name)
        return self._returned(record, self._comm.all_reduce_(tensor, op=op, name=self._label + name))

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        record = self._called("reduce_scatter", flat, name)
        return self._returned(record, self._comm.reduce_scatter_(flat, op=op, name=self._label + name))

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        record = self._called("all_gather", flat, name)
        return self._returned(record, self._comm.all_gather_(flat, name=self._label + name))

    def all_gather(self, tensor: Tensor, *, name: str = "") -> list[Tensor]:
        return self._comm.all_gather(tensor, name=name)

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = "") -> Work:
        record = self._called("all_to_all", outputs[0], name) if outputs else None
        if record is not None:
            record.nbytes = sum(tensor.nbytes for tensor in outputs)
        return self._returned(record, self._comm.all_to_all(inputs, outputs, name=self._label + name))

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        record = self._called("broadcast", tensor, name)
        return self._returned(record, self._comm.broadcast_(tensor, src=src, name=self._label + name))

    def broadcast_object(self, obj: T, *, src: int = 0) -> T:
        return self._comm.broadcast_object(obj, src=src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._comm.all_gather_object(obj)

    def barrier(self) -> None:
        self._comm.barrier()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        self._comm.wait_until(reached)

    def abandon(self) -> None:
        self._comm.abandon()

    def close(self) -> None:
        self._comm.close()

    def _called(self, kind: str, tensor: Tensor, name: str) -> CollectiveRecord | None:
        if not self._listeners:
            return None
        record = CollectiveRecord(self._label + _NUMBERS.sub("", name), kind, tensor.nbytes, time.perf_counter())
        if tensor.is_cuda:
            self._side = self._side or torch.cuda.Stream(tensor.device)
            record.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            record.events[0].record()
        return record

    def _returned(self, record: CollectiveRecord | None, work: Work) -> Work:
        if record is None:
            return work
        record.returned = time.perf_counter()
        if record.events is not None and self._side is not None:
            with torch.cuda.stream(self._side):  # ordered after the collective, and after nothing else
                _wait_on_stream(work)
                record.events[1].record()
        return _RecordedWork(work, record, self._listeners)


def unrecorded(comm: Communicator) -> Communicator:
    """The communicator whose collectives no listener is told of: for collectives that are no part of a step."""
    return comm._comm if isinstance(comm, RecordedCommunicator) else comm


@dataclass(slots=True, eq=False)
class _RecordedWork:
    _work: Work
    _record: CollectiveRecord | None
    _listeners: list[Listener]

    def wait(self) -> None:
        record, self._record = self._record, None
        if record is None:
            self._work.wait()
            return
        record.waited_from = time.perf_counter()
        if record.events is not None:
            record.wait_event = torch.cuda.Event(enable_timing=True)
            record.wait_event.record()
        self._work.wait()
        record.waited_until = time.perf_counter()
        if record.events is None:
            record.ended = getattr(self._work, "ended", None) or record.waited_until
        tell(self._listeners, record)

    def done(self) -> bool:
        return self._work.done()


def _wait_on_stream(work: Work) -> None:
    """Order the current stream after ``work`` without what `Work.wait` queues behind it once."""
    order = getattr(work, "order_current_stream", None)
    if order is not None:
        order()


def tell(listeners: list[Callable[[T], None]], argument: T) -> None:
    """Call all ``listeners``; one that raises is told no more, which is logged. A `RingError` passes."""
    for listener in list(listeners):
        try:
            listener(argument)
        except RingError:
            raise
        except Exception as error:
            listeners.remove(listener)
            _log.warning("a listener failed and is told no more: %s: %s", type(error).__name__, error)
