"""A `Communicator` that reports the times of its collectives to listeners."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.comm.timing import now
from lightning_ring.errors import RingError
from lightning_ring.host.accelerator import gpu_module, is_gpu, timed_event

_log = logging.getLogger("lightning_ring")

T = TypeVar("T")
# a record has the time, and a chart one channel a bucket
_NUMBERS = re.compile(r"^backward \d+ \(step \d+[^)]*\): ")


@dataclass(slots=True)
class CollectiveRecord:
    """One collective, as its caller saw it. Times are those of `time.perf_counter`, in seconds.

    The caller loses ``returned - called`` and ``waited_until - waited_from``; the rest of the time
    until ``ended`` is hidden under what it computes. Collectives of one communicator begin in the
    order of their calls, but one may be called, and over Gloo also be on the wire, before the last
    one has ended, and then even end before it. Whoever adds up takes of each what comes after the
    end of those before it (`monitor.step_window` does), so that no moment counts twice; when an
    overlapping one began on the wire is not known.

    On a GPU ``ended`` is `None`. ``events`` tell when the stream that called it came to it, and
    when it was over; ``wait_event`` when the stream that waited for it came to that.
    """

    name: str  # the caller's, such as "bucket 3 (...)", without the number of the backward
    kind: str  # "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "broadcast"
    nbytes: int  # of this rank's tensor, as it travels
    called: float
    returned: float = 0.0
    waited_from: float = 0.0
    waited_until: float = 0.0
    # when it was over, if the work has such an attribute; else when its caller had waited
    ended: float | None = None
    events: tuple[Any, Any] | None = None
    wait_event: Any = None


Listener = Callable[[CollectiveRecord], None]


def passed_on(inside: str, name: str) -> Any:
    """The attribute or method ``name`` of the object that ``self`` has ``inside``."""
    return property(lambda self: getattr(getattr(self, inside), name))


class RecordedCommunicator(Communicator):
    """``comm``, whose collectives are told to ``listeners`` once they were waited for, in the
    thread that waited.

    Costs four clock reads a collective, on a GPU three events; without listeners nothing.
    Collectives that block are not recorded. The list may change while training goes on; a listener
    that raises is taken off it. ``label`` begins the names of all collectives that are recorded:
    ranks that confuse two of such communicators get an error.
    """

    def __init__(self, comm: Communicator, listeners: list[Listener], label: str = "") -> None:
        self._comm = comm
        self._label = label
        self.rank, self.world_size = comm.rank, comm.world_size
        self._listeners = listeners
        self._side: Any = None  # a stream

    shard_indices = passed_on("_comm", "shard_indices")
    is_nested = passed_on("_comm", "is_nested")
    empty = passed_on("_comm", "empty")
    all_gather = passed_on("_comm", "all_gather")
    broadcast_object = passed_on("_comm", "broadcast_object")
    all_gather_object = passed_on("_comm", "all_gather_object")
    barrier = passed_on("_comm", "barrier")
    wait_until = passed_on("_comm", "wait_until")
    open_requests = passed_on("_comm", "open_requests")
    abandon = passed_on("_comm", "abandon")
    close = passed_on("_comm", "close")

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        record = self._called("all_reduce", tensor, name)
        return self._returned(
            record, self._comm.all_reduce_(tensor, op=op, name=self._label + name)
        )

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        record = self._called("reduce_scatter", flat, name)
        return self._returned(
            record, self._comm.reduce_scatter_(flat, op=op, name=self._label + name)
        )

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        record = self._called("all_gather", flat, name)
        return self._returned(record, self._comm.all_gather_(flat, name=self._label + name))

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        record = self._called("all_to_all", outputs[0], name) if outputs else None
        if record is not None:
            record.nbytes = sum(tensor.nbytes for tensor in outputs)
        return self._returned(
            record, self._comm.all_to_all(inputs, outputs, name=self._label + name)
        )

    def average_by(
        self, flat: Tensor, average: Callable[[Tensor, Communicator], Work], *, name: str = ""
    ) -> Work:
        if not self.is_nested:
            return average(flat, self)
        record = self._called("all_reduce", flat, name)
        return self._returned(record, self._comm.average_by(flat, average, name=self._label + name))

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        record = self._called("broadcast", tensor, name)
        return self._returned(
            record, self._comm.broadcast_(tensor, src=src, name=self._label + name)
        )

    def _called(self, kind: str, tensor: Tensor, name: str) -> CollectiveRecord | None:
        if not self._listeners:
            return None
        record = CollectiveRecord(
            self._label + _NUMBERS.sub("", name), kind, tensor.nbytes, time.perf_counter()
        )
        if is_gpu(tensor.device):
            self._side = self._side or gpu_module(tensor.device).Stream(tensor.device)
            record.events = now(tensor.device), timed_event(tensor.device)
        return record

    def _returned(self, record: CollectiveRecord | None, work: Work) -> Work:
        if record is None:
            return work
        record.returned = time.perf_counter()
        if record.events is not None and self._side is not None:
            # ordered after the collective, and after nothing else
            with gpu_module(self._side.device).stream(self._side):
                if (order := getattr(work, "order_current_stream", None)) is not None:
                    order()  # unlike `Work.wait` it queues nothing behind it
                record.events[1].record()
        return _RecordedWork(work, record, self._listeners, self._side)


def unrecorded(comm: Communicator) -> Communicator:
    """The communicator whose collectives no listener is told of: for collectives that are no
    part of a step.
    """
    return comm._comm if isinstance(comm, RecordedCommunicator) else comm


@dataclass(slots=True, eq=False)
class _RecordedWork:
    _work: Work
    _record: CollectiveRecord | None
    _listeners: list[Listener]
    _side: Any

    def wait(self) -> None:
        record, self._record = self._record, None
        if record is None:
            self._work.wait()
            return
        record.waited_from = time.perf_counter()
        if record.events is not None:
            record.wait_event = now(self._side.device)
        self._work.wait()
        record.waited_until = time.perf_counter()
        if record.events is None:
            record.ended = getattr(self._work, "ended", None) or record.waited_until
        tell(self._listeners, record)

    def done(self) -> bool:
        return self._work.done()


def tell(listeners: list[Callable[[T], None]], argument: T) -> None:
    """Call all ``listeners``; one that raises is told no more, which is logged. A `RingError`
    passes.
    """
    for listener in list(listeners):
        try:
            listener(argument)
        except RingError:
            raise
        except Exception as error:
            listeners.remove(listener)
            _log.warning(
                "a listener failed and is told no more: %s: %s", type(error).__name__, error
            )
