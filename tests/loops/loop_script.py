"""A plain loop as a user starts it: ``python loop_script.py RANKS WHAT``; each rank prints one
line.

WHAT: "train", or "leave": rank 1 ends before the others.
"""

import os
import sys

import torch
from torch import nn

import lightning_ring


def main(ranks, what):
    torch.manual_seed(os.getpid())  # replaced by rank 0's values
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = lightning_ring.distribute(model, optimizer, ranks=int(ranks) or None)
    for step in range(6):
        if training.rank == 1 and step == 3 and what == "leave":
            return
        inputs = torch.full((3, 4), float(training.rank + step))
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = training.all_gather(model.weight)
    print(
        f"rank {training.rank} of {training.world_size}: "
        f"equal={bool((weights == weights[0]).all())}",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
