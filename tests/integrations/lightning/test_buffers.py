"""Buffers that enter the loss are found where ranks change them differently; statistics of
BatchNorm are left alone.
"""

import torch
from torch import nn

from lightning_ring.integrations.lightning.buffers import BufferBroadcast
from tests.thread_ranks import run_ranks


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def train(comm):
    """Eight batches on each rank; the queue takes other values on each."""
    module, seen, warnings = Module(), [], []
    buffers = BufferBroadcast("epoch", warnings.append)
    for batch in range(8):
        buffers.before_batch(module, comm, batch)
        seen.append((float(module.queue[0]), float(module.norm.running_mean[0])))
        module.norm.running_mean += comm.rank
        module.steps += 1
        module.queue += comm.rank + 1
    return seen, warnings


def test_a_buffer_that_differs_follows_rank_0_and_statistics_are_each_ranks_own():
    for rank, (seen, warnings) in enumerate(run_ranks(2, train)):
        assert seen == [(float(batch), float(batch * rank)) for batch in range(8)]
        (warning,) = warnings
        assert "buffer(s) queue differently" in warning
