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


def train(comm, when, changes_from):
    """Eight batches on each rank; the queue takes other values on each from batch
    ``changes_from`` on.
    """
    module, warnings = Module(), []
    buffers = BufferBroadcast(when, warnings.append)
    seen = []
    for batch in range(8):
        buffers.before_batch(module, comm, batch)
        seen.append([float(module.queue[0]), float(module.norm.running_mean[0])])
        module.norm.running_mean += comm.rank
        module.steps += 1
        if batch >= changes_from:
            module.queue += comm.rank + 1
    return seen, warnings


def test_a_buffer_that_differs_follows_rank_0_from_the_next_check_on():
    for changes_from, found in ((0, 1), (2, 4), (4, None)):
        for rank, (seen, warnings) in enumerate(
            run_ranks(2, lambda comm, c=changes_from: train(comm, "epoch", c))
        ):
            queue = [values[0] for values in seen]
            followed = 8 if found is None else found
            assert queue[followed:] == [float(batch - changes_from) for batch in range(followed, 8)]
            own = [float(max(0, batch - changes_from) * (rank + 1)) for batch in range(followed)]
            assert queue[:followed] == own
            assert len(warnings) == (found is not None)
            assert all("buffer(s) queue differently" in warning for warning in warnings)
            assert [values[1] for values in seen] == [float(batch * rank) for batch in range(8)]
