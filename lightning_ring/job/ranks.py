"""Rank, world size and node of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ring.comm.backends.mpi_library import SAME_LIBRARY, import_mpi, library_name
from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import LaunchVariables, launcher_variables, slurm_variables


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and sizes of one process in one job.

    Ranks of one node are numbered ``local_rank`` 0 to ``local_size`` - 1. Nodes are numbered by
    their lowest rank.

    Attributes:
        source: Where the numbers come from: ``"mpi"``, ``"torchrun"``, ``"slurm"``, ``"ringrun"``
            (plain processes that our launcher started), ``"spawn"`` (``start_method`` spawn or
            fork), ``"group"`` (a process group of torch.distributed that was open before) or
            ``"single"``.
        generation: The number of the job, 0 for the first one of a process (`Job`).
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    source: str
    generation: int = 0

    @property
    def name(self) -> str:
        """This rank in messages."""
        generation = f" of generation {self.generation}" if self.generation else ""
        return f"rank {self.rank}{generation}"


SINGLE = RankInfo(0, 1, 0, 1, 0, 1, "single")


def discover_ranks(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """The `RankInfo` of this process. Collective where MPI started it.

    mpi4py is imported only when the launcher's variables (``environ``) say MPI.
    """
    found = launcher_variables(environ)
    if found is None:
        return SINGLE
    if found.source != "mpi":
        return info_from_variables(found)
    try:
        return _ask_mpi(found)
    except RankDiscoveryError:
        # a cluster whose srun always offers PMI, used without a matching MPI
        slurm = slurm_variables(environ)
        if slurm is None or (slurm.rank, slurm.world_size) != (found.rank, found.world_size):
            raise
        return info_from_variables(slurm)


def info_from_variables(found: LaunchVariables) -> RankInfo:
    numbers = (found.local_rank, found.local_size, found.node_rank, found.num_nodes)
    assert None not in numbers, found
    return RankInfo(found.rank, found.world_size, *numbers, found.source)  # type: ignore[arg-type]


def _ask_mpi(found: LaunchVariables) -> RankInfo:
    mpi = import_mpi(found.launcher)
    world = mpi.COMM_WORLD
    if (world.size, world.rank) != (found.world_size, found.rank):
        raise RankDiscoveryError(
            f"mpi4py sees rank {world.rank} of {world.size}, but {found.launcher} says rank "
            f"{found.rank} of {found.world_size}. mpi4py and this launcher come from different MPI "
            f"libraries (mpi4py loaded: {library_name(mpi.Get_library_version())}). {SAME_LIBRARY}"
        )
    # from Slurm: an MPI that its PMIx tells little takes every rank for a node
    if found.num_nodes is not None:
        return info_from_variables(found)
    node = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    # the node's lowest rank names it, however the ranks were placed
    leader = node.bcast(world.rank)
    leaders = sorted(set(world.allgather(leader)))
    places = node.rank, node.size, leaders.index(leader), len(leaders)
    node.Free()
    return RankInfo(world.rank, world.size, *places, "mpi")
