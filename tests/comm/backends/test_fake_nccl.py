"""The fake of NCCL orders streams as NCCL does; the streams are fakes that record it."""

import threading
from contextlib import contextmanager

import pytest
import torch

from tests.comm.backends import fake_nccl
from tests.comm.backends.fake_nccl import over_fake_nccl
from tests.thread_ranks import run_ranks


class FakeStream:
    """Notes the streams that it goes on after, and what makes it late."""

    current = threading.local()

    def __init__(self):
        self.log = []

    def wait_event(self, event):
        self.log.append(("after", event.stream))


class FakeEvent:
    def record(self):
        self.stream = FakeStream.current.stream

    def query(self):
        return True


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors count as a GPU's."""

    @contextmanager
    def stream(entered):
        before, FakeStream.current.stream = FakeStream.current.stream, entered
        yield
        FakeStream.current.stream = before

    fakes = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": stream,
        "current_stream": lambda: FakeStream.current.stream,
        "_sleep": lambda cycles: FakeStream.current.stream.log.append("late"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fake_nccl, "on_gpu", lambda output: True)


def test_a_collective_is_after_all_callers_and_who_waits_is_after_it(monkeypatch, gpu):
    open_nccl = over_fake_nccl(monkeypatch)
    callers = [FakeStream(), FakeStream()]
    first_has_called = threading.Event()

    def rank(comm):
        FakeStream.current.stream = callers[comm.rank]
        ours, tensor = open_nccl(comm), torch.full((4,), comm.rank + 1.0)
        if comm.rank == 1:
            assert first_has_called.wait(10), "the call of rank 0 waits for rank 1"
        work = ours.all_reduce_(tensor)
        first_has_called.set()
        assert callers[comm.rank].log == []
        work.wait()
        assert torch.equal(tensor, torch.full((4,), 3.0))

    run_ranks(2, rank)
    ((_, group),), ((_, same),) = (caller.log for caller in callers)
    assert group is same
    assert group.log[-1] == "late"
    assert {other for _, other in group.log[:-1]} == set(callers)
