"""NCCL between the threads of one process: its arithmetic, its order among streams, and a record of
what torch was asked for.

NCCL itself refuses two ranks on one GPU. Here a collective is computed once, by the rank that calls
it last, with torch's own operations.

- Tensors on a GPU: a call returns at once, as NCCL's does. The collective runs on a stream of the
  group, after what the callers' current streams held when they called. `FakeWork.wait` blocks the
  host until every rank has called, then orders the caller's current stream after the collective,
  and lets go of the caller's tensors, as torch's NCCL works do.
- Tensors on the CPU: a call returns when every rank has called, and the result is there.

A rank that waits needs the other ranks' threads to go on. Autograd has one thread for each GPU,
which the backwards of all thread-ranks would share: a hook that waits in one of them would stop the
others for ever. Thread-ranks on a GPU therefore train inside
``set_multithreading_enabled(False)``, where a backward runs in the thread that called it.
"""

import threading
import time
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ring.comm.backends import nccl
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.communicator import shard
from lightning_ring.comm.waiting import CHECK_SECONDS

LATE_CYCLES = 2_000_000  # of a GPU's clock, some 1 ms: who does not wait reads the old values

_REDUCE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


def reduced(rows, op):
    """NCCL's sums are in the tensor's type, rank by rank. So is the factor that AVG multiplies
    with first.
    """
    if op == dist.ReduceOp.AVG:
        # a copy from the host would make it wait for the stream
        factor = torch.full((), 1 / len(rows), dtype=rows[0].dtype, device=rows[0].device)
        rows, op = [row * factor for row in rows], dist.ReduceOp.SUM
    total = rows[0].clone()
    for row in rows[1:]:
        total = _REDUCE[op](total, row)
    return total


class Collective:
    """One collective of all ranks: what they have handed in so far, and when it was launched."""

    def __init__(self, kind, world_size):
        self.kind = kind
        self.sent = [None] * world_size
        self.outputs = [None] * world_size
        self.events = []  # of the callers' streams
        self.num_called = 0
        self.launched = threading.Event()
        self.over = None  # an event of the group's stream
        self.error = None


class Meeting:
    """The collectives of one group, in the order of their calls."""

    def __init__(self, world_size):
        self._world_size = world_size
        self._lock = threading.Lock()
        self._open = {}
        self._stream = None

    def call(self, number, rank, kind, sent, output, how):
        """Rank ``rank`` calls its collective ``number``; the last of all ranks launches it."""
        with self._lock:
            collective = self._open.setdefault(number, Collective(kind, self._world_size))
            if collective.kind != kind:
                collective.error = RuntimeError(f"ranks call {collective.kind} and {kind}")
            collective.sent[rank], collective.outputs[rank] = sent, output
            if on_gpu(output):
                event = torch.cuda.Event()
                event.record()
                collective.events.append(event)
            collective.num_called += 1
            if collective.num_called == self._world_size:
                del self._open[number]
                self._launch(collective, how)
            return collective

    @torch.no_grad()
    def _launch(self, collective, how):
        try:
            if collective.error is None and not collective.events:
                how(collective.sent, collective.outputs)
            elif collective.error is None:
                self._stream = self._stream or torch.cuda.Stream()
                with torch.cuda.stream(self._stream):
                    for event in collective.events:
                        self._stream.wait_event(event)
                    torch.cuda._sleep(LATE_CYCLES)
                    how(collective.sent, collective.outputs)
                    collective.over = torch.cuda.Event()
                    collective.over.record()
        except Exception as error:
            collective.error = error
        collective.sent, collective.outputs = [], []
        collective.launched.set()


def on_gpu(output):
    return (output if isinstance(output, Tensor) else output[0]).is_cuda


class FakeGroup:
    """One rank's NCCL process group among the thread-ranks of ``comm``.

    Attributes:
        calls: The collectives so far, as (kind, operation), and what ended the group.
        late: Until it is set, collectives are on the stream and not over.
        registered: What it allocates, if anything.
        connected: Whether NCCL has started, as by ``device_id`` or by the first collective.
    """

    def __init__(self, comm, meeting=None, connected=True):
        self.comm = comm
        self.connected = connected
        self.calls = []
        self.late = None
        self.registered = None
        self._meeting = meeting or Meeting(1)
        self._num_collectives = 0

    _device_types = (torch.device("cuda"),)

    def _get_backend(self, device):
        return self

    def supports_tensor_alloc(self, device):
        return self.registered is not None

    def allocate_tensor(self, size, *, dtype, device):
        if not self.connected:
            raise RuntimeError(
                "NCCL communicator has not been initialized before mem pool creation"
            )
        return self.registered

    def abort(self):
        """Ends the kernels on the stream, and with them every wait inside the driver."""
        self.calls.append(("abort", None))
        if self.late is not None:
            self.late.set()

    def start(self, kind, op, sent, output, how):
        self.calls.append((kind, op))
        number, self._num_collectives = self._num_collectives, self._num_collectives + 1
        called = self._meeting.call(number, self.comm.rank, (kind, op), sent, output, how)
        work = FakeWork(self, called, (sent, output))
        if not on_gpu(output):
            work.wait()
        return work


class FakeDistributed:
    """In place of the module `torch.distributed` in the NCCL backend."""

    ReduceOp = dist.ReduceOp
    ProcessGroup = dist.ProcessGroup

    def all_reduce(self, tensor, *, op, group, async_op):
        def how(sent, outputs):
            total = reduced(sent, op)
            for output in outputs:
                output.copy_(total)

        return group.start("all_reduce", op, tensor, tensor, how)

    def reduce_scatter_tensor(self, output, sent, *, op, group, async_op):
        def how(sent, outputs):
            total = reduced(sent, op)
            for rank, part in enumerate(outputs):
                part.copy_(shard(total, len(outputs), rank))

        return group.start("reduce_scatter", op, sent, output, how)

    def all_gather_into_tensor(self, output, sent, *, group, async_op):
        def how(sent, outputs):
            whole = torch.cat(sent)
            for one in outputs:
                one.copy_(whole)

        return group.start("all_gather", None, sent, output, how)

    def all_to_all(self, outputs, sent, *, group, async_op):
        def how(sent, outputs):
            for target, rows in enumerate(outputs):
                for source, row in enumerate(rows):
                    row.copy_(sent[source][target])

        return group.start("all_to_all", None, sent, outputs, how)

    def broadcast(self, tensor, src, *, group, async_op):
        def how(sent, outputs):
            for output in outputs:
                output.copy_(sent[src])

        return group.start("broadcast", src, tensor, tensor, how)

    def get_global_rank(self, group, rank):
        return rank

    def is_initialized(self):
        return True

    def destroy_process_group(self, group):
        if group.late is not None:
            assert group.late.wait(10), "destroying a group waits for its kernels"
        group.calls.append(("destroy", None))


class FakeWork:
    """Waiting for it orders streams, and so returns once every rank has called."""

    def __init__(self, group, collective, held):
        self._group = group
        self._collective = collective
        self._late = group.late
        self._held = held  # by nothing else, maybe

    def wait(self, *args):
        policy = self._group.comm._policy
        until = time.monotonic() + policy.seconds
        while not self._collective.launched.wait(CHECK_SECONDS):
            policy.check_peers()
            if time.monotonic() > until:
                raise RuntimeError(f"some rank did not call {self._collective.kind}")
        if self._collective.error is not None:
            raise RuntimeError(str(self._collective.error)) from self._collective.error
        if self._collective.over is not None:
            torch.cuda.current_stream().wait_event(self._collective.over)
        self._held = None
        return True

    def is_completed(self):
        collective = self._collective
        return (
            (self._late is None or self._late.is_set())
            and collective.launched.is_set()
            and (collective.over is None or collective.over.query())
        )


class CPUTensorsOverNCCL(NCCLCommunicator):
    """The NCCL backend, which takes CPU tensors for its own."""

    def _serves(self, tensor):
        return True


def over_fake_nccl(monkeypatch, backend=CPUTensorsOverNCCL, group=FakeGroup):
    """Have the NCCL backend call fakes; returns what makes a thread-rank's communicator, a
    ``backend``, of such a ``group``.

    A rank makes one in each `run_ranks`.
    """
    monkeypatch.setattr(nccl, "dist", FakeDistributed())
    monkeypatch.setattr(
        nccl, "_abort_process_group", lambda ended: ended.calls.append(("abort", None))
    )
    meetings = WeakKeyDictionary()
    lock = threading.Lock()

    def open_nccl(host, **options):
        with lock:
            world = host.transport._world
            meeting = meetings.setdefault(world, Meeting(world.world_size))
        return backend(group(host, meeting), host, host._policy, **options)

    return open_nccl
