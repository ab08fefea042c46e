"""How many bytes of buckets live at once while the layout changes."""

import weakref

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.gradients.compression import PowerSGD
from tests.thread_ranks import run_ranks


class CountedMemory(RecordedCommunicator):
    """Counts the bytes of `empty` that are still in use."""

    def __init__(self, comm):
        super().__init__(comm, [])
        self.live = self.peak = 0

    def empty(self, numel, dtype, device):
        memory = super().empty(numel, dtype, device)
        self.live += memory.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(memory.untyped_storage(), self._freed, memory.nbytes)
        return memory

    def _freed(self, num_bytes):
        self.live -= num_bytes


class Mixed(nn.Module):
    """Backward produces gradients in another order than the reverse of registration, so that
    buckets are sorted.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for index in (3, 0, 5, 1, 4, 2):
            x = self.layers[index](x).tanh()
        return x.square().mean()


def train(comm, algorithm, steps=4):
    """Returns the bytes of gradients, and the most bytes of buckets that lived: at all, and at
    the end of a forward.
    """
    memory = CountedMemory(comm)
    torch.manual_seed(0)
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm.attach(net, [optimizer], memory)
    in_forward = 0
    for _ in range(steps):
        algorithm.begin_batch()
        with algorithm.forward():
            loss = net(torch.ones(2, 64))
        in_forward = max(in_forward, memory.live)
        optimizer.zero_grad()
        with algorithm.backward():
            loss.backward()
        optimizer.step()
    names = [bucket.names for bucket in algorithm.reducer.buckets]
    assert names[0][0].startswith("layers.2"), "the order did change"
    algorithm.detach()
    return sum(param.nbytes for param in net.parameters()), memory.peak, in_forward


@pytest.mark.parametrize("compression", [None, "powersgd"])
def test_old_buckets_go_before_new_ones_come(compression):
    chosen = PowerSGD(rank=1, start_iter=0) if compression else None
    for gradients, peak, _ in run_ranks(
        2, lambda comm: train(comm, Averaging(bucket_cap_mb=0.02, compression=chosen))
    ):
        assert peak < 1.1 * gradients


def test_sharded_gradients_move_into_the_new_buckets():
    """Parameters have buckets too. The averages of the first backward lie in the old ones, whose
    memory was kept until `zero_grad`: past the second forward."""
    for gradients, _, in_forward in run_ranks(
        2, lambda comm: train(comm, Sharded(bucket_cap_mb=0.02))
    ):
        assert in_forward < 2.1 * gradients
