"""A plain PyTorch loop on several ranks: ``ringrun -n 2 python plain_loop.py ring model.pt`` (or ``ring_sharded``)."""

# --8<-- [start:loop]
import sys
from datetime import timedelta

import torch
from torch import nn

from lightning_ring.algorithms import algorithm_class
from lightning_ring.algorithms.step_hooks import StepHooks
from lightning_ring.comm.replicate import broadcast_module
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import open_job
from lightning_ring.job.ranks import discover_ranks


def train(name: str, path: str) -> None:
    info, device = discover_ranks(), torch.device("cpu")
    job = open_job(info, device, timeout=timedelta(minutes=5))
    comm = open_communicator(job, "auto", device, timedelta(minutes=5), stall_warning=timedelta(minutes=1))

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    broadcast_module(model, comm)  # all ranks begin with rank 0's values
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    algorithm = algorithm_class(name)()
    algorithm.attach(model, [optimizer], comm)
    hooks = StepHooks(algorithm)

    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    mine = samples[info.rank :: info.world_size]  # each rank trains on its part of the data
    for _ in range(20):
        algorithm.begin_batch()
        with algorithm.forward():
            loss = nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True))
        with algorithm.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    hooks.remove()
    algorithm.detach()
    if info.rank == 0:
        torch.save(model.state_dict(), path)
    job.close()


# --8<-- [end:loop]


if __name__ == "__main__":
    train(*sys.argv[1:])
