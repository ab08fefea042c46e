"""Who this process is: its rank, the world, its node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's place among all of them.

    ``source`` says who told: ``"mpi"``, ``"torchrun"``, ``"slurm"``, ``"ringrun"`` (plain processes that our launcher
    started) or ``"single"``. Ranks of one node are numbered ``local_rank`` 0 to ``local_size`` - 1.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    source: str
