"""States that differ from rank to rank, collected on rank 0 for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_ring.comm.communicator import Communicator


def rank_state(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """That of this rank; ``parameters`` by name, none where all ranks have the same."""
    return {
        "parameters": parameters,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }


@torch.no_grad()
def load_rank_state(
    saved: Mapping[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    for name, param in module.named_parameters():
        if name in saved["parameters"]:
            param.copy_(saved["parameters"][name])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=False):
        optimizer.load_state_dict(state)


def collect(state: Any, comm: Communicator) -> list[Any]:
    """Every rank's picklable ``state``, by rank, on rank 0; elsewhere empty. Collective.

    One rank's at a time: the others hold no more than one besides their own.
    """
    mine = tree_map(
        lambda value: comm.read(value.detach()).clone() if isinstance(value, Tensor) else value,
        state,
    )
    states = []
    for rank in range(comm.world_size):
        each = comm.broadcast_object(mine, src=rank, name="state of a rank")
        if comm.rank == 0:
            states.append(each)
    return states
