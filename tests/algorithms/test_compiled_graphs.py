"""A compiled model: collectives start before its backward ends."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.recording import RecordedCommunicator
from tests.thread_ranks import run_ranks


@pytest.fixture(autouse=True)
def a_mode_before_any_thread_compiles():
    with FakeTensorMode():  # torch 2.11 keeps a pointer into the first thread that compiles
        pass


class Journal(TorchDispatchMode):
    """The matrix products, and the collectives of gradients, in the order in which they began."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.entries.append("product")
        return func(*args, **(kwargs or {}))


class Noted(RecordedCommunicator):
    def __init__(self, comm, journal):
        super().__init__(comm, [])
        self.journal = journal

    def all_reduce_(self, tensor, **kwargs):
        if tensor.numel() > 1000:
            self.journal.entries.append("collective")
        return super().all_reduce_(tensor, **kwargs)

    def reduce_scatter_(self, flat, **kwargs):
        self.journal.entries.append("collective")
        return super().reduce_scatter_(flat, **kwargs)


def backward_of_a_compiled_model(comm, algorithm):
    """What the third backward did. Layers of 1 MiB, each of which is a bucket."""
    torch.compiler.reset()
    journal = Journal()
    net = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(512, 512, bias=False), nn.Tanh()))
    )
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    algorithm.attach(net, [optimizer], Noted(comm, journal))
    for _ in range(3):
        algorithm.begin_batch()
        with algorithm.forward():
            loss = compiled(torch.ones(2, 512)).sum()
        optimizer.zero_grad()
        journal.entries.clear()
        with algorithm.backward(), journal:
            loss.backward()
        optimizer.step()
    algorithm.wait_parameters()
    entries = list(journal.entries)
    algorithm.detach()
    assert DistributedDataParallel._active_ddp_module is None
    return entries


@pytest.mark.ranks  # it compiles
@pytest.mark.parametrize("make", [Averaging, Sharded])
def test_buckets_leave_while_the_backward_of_a_compiled_model_runs(make):
    (entries,) = run_ranks(
        1, lambda comm: backward_of_a_compiled_model(comm, make(bucket_cap_mb=1.0))
    )
    assert entries.count("collective") == 4
    first, last_product = (
        entries.index("collective"),
        len(entries) - 1 - entries[::-1].index("product"),
    )
    assert "product" in entries[:first]
    assert entries[first:last_product].count("collective") == 3, (
        "all but the last bucket leave before backward ends"
    )


def graphs_of_a_later_batch(comm):
    """How many graphs a compiled model of one bucket has when it is compiled again after a step."""
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    compiled = torch.compile(net, backend=count, dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    algorithm = Sharded(bucket_cap_mb=25)
    algorithm.attach(net, [optimizer], comm)
    for size in (4, 4, 3):
        algorithm.begin_batch()
        graphs.clear()
        with algorithm.forward():
            loss = compiled(torch.ones(size, 64)).sum()
        optimizer.zero_grad()
        with algorithm.backward():
            loss.backward()
        optimizer.step()
    algorithm.wait_parameters()
    algorithm.detach()
    return len(graphs)


@pytest.mark.ranks  # it compiles
def test_parameters_that_lie_in_a_bucket_split_no_graph():
    assert run_ranks(1, graphs_of_a_later_batch) == [1]
