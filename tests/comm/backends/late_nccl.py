"""NCCL without a GPU, whose collectives run as late as a stream lets them: tensors that are read,
written or freed before the stream was ordered after their collective are found.
"""

import threading
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

from lightning_ring.comm import recording
from lightning_ring.comm.communicator import as_bytes
from lightning_ring.comm.recording import RecordedCommunicator
from tests.comm.backends.fake_nccl import FakeGroup, over_fake_nccl
from tests.fake_device import on_fake_device

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


class LateGroup(FakeGroup):
    """Unless ``late``, collectives are over when they are called."""

    def __init__(self, streams, late, comm, meeting):
        super().__init__(comm, meeting)
        self._streams, self._is_late = streams, late

    def start(self, kind, op, sent, output, how):
        several = isinstance(output, list)
        inputs, outputs = (sent, output) if several else ([sent], [output])
        own = [tensor.clone() for tensor in inputs]
        results = [torch.empty_like(tensor) for tensor in outputs]
        # on the CPU: over when every rank has called
        super().start(kind, op, *((own, results) if several else (own[0], results[0])), how)
        for tensor in outputs:
            as_bytes(tensor).fill_(_POISON)
        if kind == "all_gather":
            sent.copy_(own[0])  # a part of the output, which nobody writes
        work = LateWork(self._streams, [*inputs, *outputs], outputs, results)
        if not self._is_late:
            work.wait()
        return work


def over_late_nccl(monkeypatch, *, late=True):
    """Have the NCCL backend call fakes with a `LateGroup`; returns what makes a thread-rank's
    communicator, which the monitor listens to.
    """
    streams = Streams()
    on_fake_device(monkeypatch, lambda: lambda: True)
    open_nccl = over_fake_nccl(monkeypatch, group=partial(LateGroup, streams, late))
    monkeypatch.setattr(recording, "is_gpu", lambda device: True)
    monkeypatch.setattr(recording, "gpu_module", lambda device: streams)
    for name in ("now", "timed_event"):
        monkeypatch.setattr(recording, name, lambda device: SimpleNamespace(record=lambda: None))
    return lambda host: RecordedCommunicator(open_nccl(host), [lambda record: None])
