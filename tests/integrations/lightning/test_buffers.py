"""Buffers that enter the loss are found where ranks change them differently; statistics of
BatchNorm are left alone.
"""

import torch
from torch import nn

from lightning_ring.integrations.lightning import buffers
from tests.thread_ranks import run_ranks


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def train(comm):
    """Eight batches on each rank; the queue takes other values on each."""
    module, seen = Module(), []
    broadcast = buffers.BufferBroadcast("epoch")
    for batch in range(8):
        broadcast.before_batch(module, comm, batch)
        seen.append((float(module.queue[0]), float(module.norm.running_mean[0])))
        module.norm.running_mean += comm.rank
        module.steps += 1
        module.queue += comm.rank + 1
    return seen


def test_a_buffer_that_differs_follows_rank_0_and_statistics_are_each_ranks_own(monkeypatch):
    warnings = []
    monkeypatch.setattr(buffers, "rank_zero_warn", warnings.append)
    for rank, seen in enumerate(run_ranks(2, train)):
        assert seen == [(float(batch), float(batch * rank)) for batch in range(8)]
    assert len(warnings) == 2  # one of each rank, as all are threads here
    assert "buffer(s) queue differently" in warnings[0]
