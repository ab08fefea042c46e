"""NCCL without a GPU, whose collectives run as late as a stream lets them: tensors that are read,
written or freed before the stream was ordered after their collective are found.
"""

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from lightning_ring.comm import recording
from lightning_ring.comm.backends import nccl
from lightning_ring.comm.communicator import as_bytes, shard
from lightning_ring.comm.recording import RecordedCommunicator
from tests.comm.backends.fake_nccl import CPUTensorsOverNCCL, FakeDistributed, reduced
from tests.fake_device import on_fake_device
from tests.thread_ranks import ThreadCommunicator

_POISON = 255  # in each byte: NaN in every type of float


class Streams:
    """In place of ``torch.cuda``: the streams that a thread makes current, all without work."""

    def __init__(self):
        self._local = threading.local()

    def Stream(self, device):
        return SimpleNamespace(device=device)

    @contextmanager
    def stream(self, stream):
        self._local.side = stream
        yield
        self._local.side = None

    @property
    def is_main(self):
        """Whether the current stream is the one that computes gradients."""
        return getattr(self._local, "side", None) is None


class LateWork:
    """A collective of ``touched`` tensors. It writes ``results`` to ``outputs`` when the main
    stream is ordered after it; until then each of ``touched`` holds what it does now.

    As torch's works do, it keeps the tensors alive until the first `wait` in any stream.
    """

    def __init__(self, streams, touched, outputs, results):
        self._streams = streams
        self._held = (*touched, *outputs)
        self._places = [_place(tensor) for tensor in touched]
        self._before = [as_bytes(tensor).clone() for tensor in touched]
        self._writes = [
            (_place(output), result) for output, result in zip(outputs, results, strict=True)
        ]
        self._is_over = False

    def wait(self, *args):
        self._held = ()
        if self._streams.is_main and not self._is_over:
            self._is_over = True
            self._run()
        return True

    def is_completed(self):
        return self._is_over

    def _run(self):
        for place, before in zip(self._places, self._before, strict=True):
            assert torch.equal(as_bytes(place()), before), "written while a collective uses it"
        for place, result in self._writes:
            place().copy_(result)


def _place(tensor):
    """What finds the memory of ``tensor``, which it does not keep alive."""
    # torch keeps this object as long as the memory
    storage = weakref.ref(tensor.untyped_storage())
    numel, dtype = tensor.numel(), tensor.dtype
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()

    def find():
        memory = storage()
        assert memory is not None or not numel, "freed before the collective that uses it has run"
        found = torch.empty(0, dtype=dtype)
        return found if memory is None else found.set_(memory, offset, size, stride)

    return find


class _Group(SimpleNamespace):
    """One rank's group among the thread-ranks of ``comm``."""

    comm: ThreadCommunicator

    def _get_backend(self, device):
        return object()  # it registers no memory


class LateDistributed(FakeDistributed):
    """In place of `torch.distributed`. Unless ``late``, collectives are over when they are
    called.
    """

    def __init__(self, streams, *, late):
        self._streams = streams
        self._late = late

    def all_reduce(self, tensor, *, op, group, async_op):
        return self._start([], [tensor], [reduced(group.comm.all_gather(tensor), op)])

    def reduce_scatter_tensor(self, output, sent, *, op, group, async_op):
        total = reduced(group.comm.all_gather(sent), op)
        result = shard(total, group.comm.world_size, group.comm.rank).clone()
        return self._start([sent], [output], [result])

    def all_gather_into_tensor(self, output, sent, *, group, async_op):
        own, result = sent.clone(), torch.cat(group.comm.all_gather(sent.clone()))
        as_bytes(output).fill_(_POISON)
        sent.copy_(own)  # a part of the output, which nobody writes
        return self._launched([output], [output], [result])

    def all_to_all(self, outputs, inputs, *, group, async_op):
        results = [torch.empty_like(output) for output in outputs]
        group.comm.all_to_all([each.clone() for each in inputs], results).wait()
        return self._start(inputs, outputs, results)

    def broadcast(self, tensor, src, *, group, async_op):
        result = tensor.clone()
        group.comm.broadcast_(result, src=src).wait()
        return self._start([], [tensor], [result])

    def get_global_rank(self, group, rank):
        return rank

    def _start(self, inputs, outputs, results):
        for output in outputs:
            as_bytes(output).fill_(_POISON)
        return self._launched([*inputs, *outputs], outputs, results)

    def _launched(self, touched, outputs, results):
        work = LateWork(self._streams, touched, outputs, results)
        if not self._late:
            work.wait()
        return work


def over_late_nccl(monkeypatch, *, late=True):
    """Have the NCCL backend call `LateDistributed`; returns what makes a thread-rank's
    communicator, which the monitor listens to.
    """
    streams = Streams()
    on_fake_device(monkeypatch, lambda: lambda: True)
    monkeypatch.setattr(nccl, "dist", LateDistributed(streams, late=late))
    monkeypatch.setattr(recording, "is_gpu", lambda device: True)
    monkeypatch.setattr(recording, "gpu_module", lambda device: streams)
    for name in ("now", "timed_event"):
        monkeypatch.setattr(recording, name, lambda device: SimpleNamespace(record=lambda: None))

    def connect(host):
        comm = CPUTensorsOverNCCL(_Group(comm=host), host, host._policy)
        return RecordedCommunicator(comm, [lambda record: None])

    return connect
