"""What the environment variables of a launcher say about this process. Pure functions: nothing is imported or opened.

The launcher nearest to the process counts. torchrun and our own launcher are often started inside an MPI or a Slurm
job, and mpirun inside a Slurm job, never the other way round; so they are asked in the order torchrun, MPI,
ringrun, Slurm. (Lightning asks Slurm before MPI, and inside a batch job takes every mpirun rank for rank 0.)

RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE exported by hand count where all four are set. Inside a Slurm job
some of them, set by a cluster's prologue or a job script for another program, are not a launcher's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ring.errors import RankDiscoveryError

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LaunchVariables:
    """One process's place as its launcher states it; ``None`` where the launcher is silent (MPI knows it then).

    ``source`` is as in `RankInfo`; ``launcher`` is its name for messages.
    """

    source: str
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI_FAMILIES = {  # launcher: rank, world size, local rank, local size
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "PMI (MPICH, Intel MPI, Slurm's pmi2)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def launcher_variables(environ: Environ) -> LaunchVariables | None:
    """What the nearest launcher says, or ``None`` for a process that no launcher started.

    A Slurm batch shell, an interactive step and an ``srun`` of one task are one process, not a launcher's rank.

    Raises:
        RankDiscoveryError: The launcher's variables are incomplete, not numbers, or contradict each other.
    """
    for read in (_torchrun, _mpi, _pmix_under_slurm, _ringrun, _exported_by_hand, slurm_variables):
        if (found := read(environ)) is not None:
            _check(found)
            return found
    return None


def _torchrun(environ: Environ) -> LaunchVariables | None:
    return _rank_and_world_size(environ, "torchrun") if "TORCHELASTIC_RUN_ID" in environ else None


def _exported_by_hand(environ: Environ) -> LaunchVariables | None:
    """torchrun's variables without torchrun: job scripts and other platforms export them."""
    if "SLURM_JOB_ID" in environ and not all(name in environ for name in _TORCHRUN_NAMES):
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return _rank_and_world_size(environ, "RANK, WORLD_SIZE") if any(name in environ for name in names) else None


def _rank_and_world_size(environ: Environ, launcher: str) -> LaunchVariables:
    rank, world_size, local_rank, local_size = (
        _required(environ, name, _TORCHRUN_NAMES, launcher) for name in _TORCHRUN_NAMES
    )
    node_rank = _number(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = _number(environ, "NODE_RANK")
    num_nodes = _number(environ, "GROUP_WORLD_SIZE")
    if local_size > 0 and world_size % local_size == 0:  # ranks in blocks of one size: the only way by hand
        node_rank = rank // local_size if node_rank is None else node_rank
        num_nodes = world_size // local_size if num_nodes is None else num_nodes
    if node_rank is None or num_nodes is None:
        raise RankDiscoveryError(
            f"{launcher}: WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={local_size}, so the nodes "
            "cannot be numbered. Set GROUP_RANK (this node's number) and GROUP_WORLD_SIZE (how many nodes)."
        )
    return LaunchVariables("torchrun", launcher, rank, world_size, local_rank, local_size, node_rank, num_nodes)


def _mpi(environ: Environ) -> LaunchVariables | None:
    for launcher, (rank, world_size, local_rank, local_size) in _MPI_FAMILIES.items():
        if rank in environ or world_size in environ:
            return LaunchVariables(
                "mpi",
                launcher,
                _required(environ, rank, (rank, world_size), launcher),
                _required(environ, world_size, (rank, world_size), launcher),
                _number(environ, local_rank),
                _number(environ, local_size),
            )
    return None


def _pmix_under_slurm(environ: Environ) -> LaunchVariables | None:
    """``srun --mpi=pmix``: PMIx gives the rank, Slurm the sizes. (mpirun, which also speaks PMIx, was asked before.)"""
    if "PMIX_RANK" not in environ or "PMIX_NAMESPACE" not in environ:
        return None
    slurm = slurm_variables(environ)
    if slurm is None:
        return None
    rank = _number(environ, "PMIX_RANK")
    if rank != slurm.rank:
        raise RankDiscoveryError(
            f"srun --mpi=pmix: PMIX_RANK={rank}, but SLURM_PROCID={slurm.rank}. Start the ranks with one launcher only."
        )
    return LaunchVariables(
        "mpi",
        "srun --mpi=pmix",
        slurm.rank,
        slurm.world_size,
        slurm.local_rank,
        slurm.local_size,
        slurm.node_rank,
        slurm.num_nodes,
    )


def _ringrun(environ: Environ) -> LaunchVariables | None:
    names = ("RING_RANK", "RING_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    rank, world_size = (_required(environ, name, names, "ringrun") for name in names)
    return LaunchVariables("ringrun", "ringrun", rank, world_size, rank, world_size, 0, 1)


def slurm_variables(environ: Environ) -> LaunchVariables | None:
    """What Slurm says of a task inside an ``srun`` step of several tasks, else ``None``."""
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step >= 0xFFFFFF00:  # no step: a batch shell; the highest numbers: interactive and other shells
        return None
    if _number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    needed = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    rank, world_size, local_rank, node, num_nodes = (_required(environ, name, needed, "srun") for name in needed)
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(per_node) != num_nodes or sum(per_node) != world_size:
        raise RankDiscoveryError(
            f"srun: SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} does not describe "
            f"SLURM_STEP_NUM_TASKS={world_size} tasks on SLURM_STEP_NUM_NODES={num_nodes} nodes. "
            "Start the ranks with srun itself, and do not change its variables."
        )
    local_size = per_node[node] if node < num_nodes else 0
    return LaunchVariables("slurm", "srun", rank, world_size, local_rank, local_size, node, num_nodes)


def tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` as Slurm writes it: ``[2, 2, 2, 1]``. Empty where ``text`` is not of that form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``"gpu[03-05,9],login"`` gives ``"gpu03"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise RankDiscoveryError(f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR to the first node.")
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise RankDiscoveryError(
            f"{name}={text!r} is not a number; a launcher sets it to 0 or more. Unset it, or fix it."
        )
    return int(text)


def _required(environ: Environ, name: str, needed: tuple[str, ...], launcher: str) -> int:
    value = _number(environ, name)
    if value is None:
        found = ", ".join(f"{other}={environ[other]}" for other in needed if other in environ) or "none of them"
        raise RankDiscoveryError(
            f"{launcher}: {name} is not set, but {found} is. All of {', '.join(needed)} are needed: "
            "start the ranks with mpirun, srun, torchrun or ringrun, or unset what is left of another launcher."
        )
    return value


def _check(found: LaunchVariables) -> None:
    pairs = (
        ("rank", found.rank, "the world size", found.world_size),
        ("local rank", found.local_rank, "the ranks of this node", found.local_size),
        ("node rank", found.node_rank, "the number of nodes", found.num_nodes),
        ("rank of this node", found.local_rank, "the world size", found.world_size),
    )
    for what, number, of_what, size in pairs:
        if number is not None and size is not None and number >= size:
            raise RankDiscoveryError(
                f"{found.launcher}: its variables say {what} {number}, but {of_what} is {size}. Two launchers may be "
                "mixed: start the ranks with one of them, and unset the variables of the other."
            )
