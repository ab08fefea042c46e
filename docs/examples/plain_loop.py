"""A plain PyTorch loop on several ranks: ``ringrun -n 2 python plain_loop.py ring model.pt`` (or
``ring_sharded``).
"""

# --8<-- [start:loop]
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ring


def train(algorithm: str, path: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = lightning_ring.distribute(model, optimizer, algorithm=algorithm)

    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(samples, samples.sum(1, keepdim=True))
    sampler = training.sampler(data)  # each rank trains on its part of the data
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            training.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()

    training.close()
    if training.rank == 0:
        torch.save(model.state_dict(), path)


# --8<-- [end:loop]


if __name__ == "__main__":
    train(*sys.argv[1:])
