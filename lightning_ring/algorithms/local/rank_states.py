"""States that differ from rank to rank, collected on rank 0 for a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_ring.comm.communicator import Communicator


def collect(state: Any, comm: Communicator) -> list[Any]:
    """Every rank's picklable ``state``, by rank, on rank 0; elsewhere empty. Collective.

    One rank's at a time: the others hold no more than one besides their own.
    """
    mine = tree_map(lambda value: comm.read(value.detach()).clone() if isinstance(value, Tensor) else value, state)
    states = []
    for rank in range(comm.world_size):
        each = comm.broadcast_object(mine, src=rank)
        if comm.rank == 0:
            states.append(each)
    return states
