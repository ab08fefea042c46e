"""Which stream waits for which, with streams that only record it."""

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.gradients import memory
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.memory import Fillers
from lightning_ring.gradients.reducer import Reducer
from tests.thread_ranks import run_ranks


class FakeStream:
    """Its name is the stream; what it waits for is noted."""

    def __init__(self, name):
        self.name = name
        self.waits = []

    def wait_stream(self, other):
        self.waits.append(other.name)

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waits.append(event.name)


class FakeDevice:
    type = "gpu"


@pytest.fixture
def device(monkeypatch):
    """``device.current`` is the current stream."""
    device = FakeDevice()
    device.current = device.main = FakeStream("main")
    device.kept_for = []
    monkeypatch.setattr(memory, "current_stream", lambda _: device.current)
    monkeypatch.setattr(
        memory, "keep_for", lambda stream, grad: device.kept_for.append(stream.name)
    )
    return device


def filled_bucket(device, *names):
    """A bucket whose gradients were computed on streams of these names, and filled on ``main``."""
    params = [Parameter(torch.ones(3)) for _ in names]
    bucket = Bucket(list(names), params)
    bucket.fillers = Fillers(device)
    for param, name in zip(params, names, strict=True):
        param.grad = torch.ones(3)
        device.current = device.main if name == "main" else FakeStream(name)
        bucket.fillers.note()
    device.current = device.main
    bucket.begin()
    bucket.fill([True] * len(names), stop=False)
    return bucket


def test_a_bucket_waits_for_every_stream_that_computed_its_gradients(device):
    bucket = filled_bucket(device, "main", "left branch", "right branch")
    assert device.main.waits == ["left branch", "right branch"]
    assert device.kept_for == ["main"] * 3
    device.main.waits.clear()
    bucket.fill([True] * 3, stop=False)
    assert device.main.waits == []  # each gradient is waited for once


def test_one_stream_waits_for_nothing(device):
    filled_bucket(device, "main", "main")
    assert device.main.waits == device.kept_for == []


def test_hooks_note_the_stream_also_where_gradients_accumulate(device):
    def rank(comm):
        param = Parameter(torch.ones(3))
        reducer = Reducer(comm, [("p", param)], shards=True)
        bucket = reducer.buckets[0]
        bucket.fillers = Fillers(device)
        device.current = FakeStream("branch")
        with reducer.no_sync(), reducer.plain_backwards(reduced=True):
            param.sum().backward()
        device.current = device.main
        with reducer.backward():
            param.sum().backward()
        return device.main.waits

    assert run_ranks(1, rank) == [["branch"]]


def test_the_stream_that_stepped_waits_for_parameters_that_arrive_on_another(device):
    def rank(comm):
        net = nn.Linear(3, 2)
        reducer = Reducer(comm, net.named_parameters(), shards=True)
        with reducer.backward():
            net(torch.ones(1, 3)).sum().backward()
        parameters = ShardedParameters(comm, reducer)
        parameters.follow()
        for bucket in parameters.buckets:
            bucket.device = device
        parameters.gather(net.parameters())
        parameters._stepped_on = device.main
        device.current = FakeStream("branch")
        parameters.wait_for(net.weight)
        return device.main.waits, device.current.waits

    assert run_ranks(1, rank) == [(["branch"], [])]
