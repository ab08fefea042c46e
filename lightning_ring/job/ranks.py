"""Rank, world size and node of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ring.comm.backends.mpi_library import SAME_LIBRARY, import_mpi, library_name
from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import LaunchVariables, launcher_variables
from lightning_ring.job.launchers.slurm import slurm_variables


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and sizes of one process in one job.

    Ranks of one node are numbered ``local_rank`` 0 to ``local_size`` - 1. Nodes are numbered by their lowest rank.

    Attributes:
        source: Where the numbers come from: ``"mpi"``, ``"torchrun"``, ``"slurm"``, ``"ringrun"`` (plain processes that
            our launcher started), ``"spawn"`` (``start_method`` spawn or fork), ``"group"`` (a process group of
            torch.distributed that was open before) or ``"single"``.
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
        return f"rank {self.rank}" + (f" of generation {self.generation}" if self.generation else "")


SINGLE = RankInfo(rank=0, world_size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, source="single")


def discover_ranks(environ: Mapping[str, str] | None = None) -> RankInfo:
    """The `RankInfo` of this process. Collective where MPI started it: every rank must call it, and MPI starts.

    mpi4py is imported only when the launcher's variables (``environ``, default `os.environ`) say MPI.
    """
    environ = os.environ if environ is None else environ
    found = launcher_variables(environ)
    if found is None:
        return SINGLE
    if found.source != "mpi":
        return info_from_variables(found)
    try:
        return _ask_mpi(found)
    except RankDiscoveryError:
        slurm = slurm_variables(environ)  # a cluster whose srun always offers PMI, used without a matching MPI
        if slurm is None or (slurm.rank, slurm.world_size) != (found.rank, found.world_size):
            raise
        return info_from_variables(slurm)


def info_from_variables(found: LaunchVariables) -> RankInfo:
    """``found``, which is complete, as those of all launchers but MPI are."""
    numbers = (found.local_rank, found.local_size, found.node_rank, found.num_nodes)
    assert None not in numbers, found
    return RankInfo(found.rank, found.world_size, *numbers, found.source)  # type: ignore[arg-type]


def _ask_mpi(found: LaunchVariables) -> RankInfo:
    mpi = import_mpi(found.launcher)
    world = mpi.COMM_WORLD
    if (world.size, world.rank) != (found.world_size, found.rank):
        raise RankDiscoveryError(
            f"mpi4py sees rank {world.rank} of {world.size} ranks, but {found.launcher} says rank {found.rank} of "
            f"{found.world_size}. mpi4py and this launcher come from different MPI libraries (mpi4py loaded: "
            f"{library_name(mpi.Get_library_version())}). {SAME_LIBRARY}"
        )
    if found.num_nodes is not None:  # from Slurm: an MPI that its PMIx tells little takes every rank for a node
        return info_from_variables(found)
    node = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    local_rank, local_size = node.rank, node.size
    leader = node.bcast(world.rank)  # the node's lowest rank names it, however the ranks were placed
    node.Free()
    leaders = sorted(set(world.allgather(leader)))
    return RankInfo(
        rank=world.rank,
        world_size=world.size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=leaders.index(leader),
        num_nodes=len(leaders),
        source="mpi",
    )


def pick_gpu(local_rank: int, local_size: int, device_count: int, visible: str | None) -> int:
    """Index of the GPU for this rank, of the ``device_count`` that this process sees.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``, for the error. A process that sees one GPU, because its launcher gave each
    rank its own, takes that one; whether two ranks were given the same one, `check_gpu_assignment` tells.
    """
    if local_rank < device_count:
        return local_rank
    if device_count == 1:  # a container or a cgroup hides the others, with or without that variable
        return 0
    raise RankDiscoveryError(
        f"Local rank {local_rank} (of {local_size} on this node) finds {device_count} GPUs "
        f"(CUDA_VISIBLE_DEVICES={visible if visible is not None else 'not set'}), and every rank needs one of its own. "
        f"Start at most {device_count} ranks on this node, make more GPUs visible, or use accelerator='cpu'."
    )


def check_gpu_assignment(gpus: Sequence[tuple[str, str]]) -> None:
    """Refuse two ranks on one GPU or partition of one (MIG). ``gpus[r]``: rank r's host name, and the UUID."""
    owners: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        other = owners.setdefault(gpu, rank)
        if other != rank:
            raise RankDiscoveryError(
                f"Ranks {other} and {rank} were given the same GPU, {gpu[1]} on {gpu[0]}; every rank needs one of its "
                "own. Start one rank per GPU, and let CUDA_VISIBLE_DEVICES show a rank either all of its node's GPUs "
                "or only its own."
            )
