"""A module on another GPU than torch's current one: events belong to the module's GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ring.comm import host_copy, timing
from lightning_ring.loops.distribute import _move

GPU = torch.device("cuda:1")


class FakeCuda(SimpleNamespace):
    """``torch.cuda`` with two GPUs. The first one is current."""

    def __init__(self):
        self.current = torch.device("cuda:0")
        self.recorded = []

    def set_device(self, device):
        self.current = device

    def current_stream(self, device=None):
        return SimpleNamespace(device=device or self.current)

    def Event(self, device="cuda", **options):
        def record(stream=None):
            self.recorded.append((stream or self.current_stream()).device)

        return SimpleNamespace(record=record)


@pytest.fixture
def cuda(monkeypatch):
    module = FakeCuda()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", module.current_stream)
    monkeypatch.setattr(torch, "Event", module.Event)
    return module


def test_the_gpu_of_a_module_that_is_there_becomes_current(cuda):
    with FakeTensorMode():
        _move(nn.Linear(3, 2, device=GPU), [], GPU)
    assert cuda.current == GPU


def test_events_are_recorded_where_the_tensor_is(cuda):
    with FakeTensorMode():
        host_copy.start_copy(torch.ones(1, device=GPU))
    timing.now(GPU)
    assert cuda.recorded == [GPU, GPU]
