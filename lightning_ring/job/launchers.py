"""Rank and sizes of this process, read from its launcher's environment variables.

Each launcher is one function that returns `LaunchVariables`, or ``None`` if another launcher
started the process, and one line in ``_READERS``; an MPI library's mpirun is one line of
``_MPI_VARIABLES``. Nothing is imported or opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_ring.errors import ConfigurationError, RankDiscoveryError

Environ = Mapping[str, str]

_MPI_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_MPI_VARIABLES = {  # by the launcher's name
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _MPI_NUMBERS),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in _MPI_NUMBERS),
    # Hydra, the mpirun of MPICH and Intel MPI, and ``srun --mpi=pmi2``.
    "PMI (MPICH, Intel MPI, Slurm's pmi2)": (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    # LSF's job step manager. Its blaunch, and pbsdsh of PBS, state no number of ranks.
    "jsrun": tuple(f"JSM_NAMESPACE_{name}" for name in _MPI_NUMBERS),
    # Flux states how many ranks a node has only if all nodes have as many
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_RINGRUN = ("RING_RANK", "RING_WORLD_SIZE")
_SLURM = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES",
)
_FIRST_SPECIAL_STEP = 0xFFFFFF00  # the highest numbers: batch, interactive and other shells


@dataclass(frozen=True, slots=True)
class LaunchVariables:
    """Rank and sizes of one process as its launcher states them; ``None`` where only MPI knows.

    ``source`` is as in `RankInfo`; ``launcher`` is the launcher's name in messages.
    """

    source: str
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


def torchrun_variables(environ: Environ) -> LaunchVariables | None:
    return _of_torch(environ, "torchrun") if "TORCHELASTIC_RUN_ID" in environ else None


def exported_variables(environ: Environ) -> LaunchVariables | None:
    """torchrun's variables without torchrun: job scripts and other platforms export them.

    Inside a Slurm job all four must be set: a cluster's prologue sets some for another program.
    """
    some = any(name in environ for name in _TORCHRUN[:3])
    whole = all(name in environ for name in _TORCHRUN)
    if whole or (some and "SLURM_JOB_ID" not in environ):
        return _of_torch(environ, "RANK, WORLD_SIZE")
    return None


def mpi_variables(environ: Environ) -> LaunchVariables | None:
    for launcher, names in _MPI_VARIABLES.items():
        if any(name in environ for name in names[:2]):
            rank, world_size = _required(environ, names[:2], launcher)
            of_node = [_number(environ, name) for name in names[2:]]
            return LaunchVariables("mpi", launcher, rank, world_size, *of_node)
    return None


def slurm_variables(environ: Environ) -> LaunchVariables | None:
    """A task in an ``srun`` step of several tasks."""
    step = _number(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP or _number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    rank, world_size, local_rank, node, num_nodes = _required(environ, _SLURM, "srun")
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    per_node = tasks_per_node(counts)
    if len(per_node) != num_nodes or sum(per_node) != world_size:
        raise RankDiscoveryError(
            f"srun: SLURM_STEP_TASKS_PER_NODE={counts!r} does "
            f"not describe SLURM_STEP_NUM_TASKS={world_size} tasks on "
            f"SLURM_STEP_NUM_NODES={num_nodes} nodes. Start the ranks with srun itself, and do not "
            "change its variables."
        )
    local_size = per_node[node] if node < num_nodes else 0
    return LaunchVariables(
        "slurm", "srun", rank, world_size, local_rank, local_size, node, num_nodes
    )


def slurm_pmix_variables(environ: Environ) -> LaunchVariables | None:
    """``srun --mpi=pmix``: PMIx gives the rank, Slurm the sizes. mpirun also speaks PMIx, and is
    asked before.
    """
    slurm = slurm_variables(environ) if "PMIX_NAMESPACE" in environ else None
    rank = _number(environ, "PMIX_RANK")
    if slurm is None or rank is None:
        return None
    if rank != slurm.rank:
        raise RankDiscoveryError(
            f"srun --mpi=pmix: PMIX_RANK={rank}, but SLURM_PROCID={slurm.rank}. Start the ranks "
            "with one launcher only."
        )
    return replace(slurm, source="mpi", launcher="srun --mpi=pmix")


def ringrun_variables(environ: Environ) -> LaunchVariables | None:
    """Plain processes that ``ringrun`` or ``python train.py`` started."""
    if not any(name in environ for name in _RINGRUN):
        return None
    rank, world_size = _required(environ, _RINGRUN, "ringrun")
    places = {
        "RING_LOCAL_RANK": f"{rank}",
        "RING_LOCAL_SIZE": f"{world_size}",
        "RING_NODE_RANK": "0",
        "RING_NUM_NODES": "1",
    }
    numbers = _required({**places, **environ}, tuple(places), "ringrun")
    return LaunchVariables("ringrun", "ringrun", rank, world_size, *numbers)


_READERS = (  # the nearest launcher first
    torchrun_variables,
    mpi_variables,
    slurm_pmix_variables,
    ringrun_variables,
    exported_variables,
    slurm_variables,
)


def launcher_variables(environ: Environ) -> LaunchVariables | None:
    """The variables of the nearest launcher, or ``None`` for a process that no launcher started.

    A Slurm batch shell, an interactive step and an ``srun`` of one task are such processes.

    Raises:
        RankDiscoveryError: The launcher's variables are incomplete, not numbers, or contradict each
            other.
    """
    # Other launchers' variables are those of the steward's process.
    if "RING_STEWARD" in environ:
        return ringrun_variables(environ)
    for read in _READERS:
        if (found := read(environ)) is not None:
            _check_ranges(found)
            return found
    return None


def check_not_started_again(environ: Environ) -> None:
    """Before this process starts ranks.

    Raises:
        RankDiscoveryError: It is a rank itself.
    """
    if "RING_LAUNCHER_PID" in environ:
        raise RankDiscoveryError(
            "This process was started as a rank, but the variables that tell its rank are gone, "
            "and it would start all ranks once more. Let whatever stands between the launcher and "
            "Python keep the environment."
        )


def started_by_steward(environ: Environ) -> bool:
    """Whether a steward (`launch.elastic`) started this process; `False` without a launcher.

    Raises `ConfigurationError`: another launcher did.
    """
    if "RING_STEWARD" in environ:
        return True
    found = launcher_variables(environ)
    if found is None:
        return False
    command, note = f"ringrun -n {found.world_size} --min-ranks 1", ""
    if found.source == "slurm":
        command, note = "ringrun --min-ranks 1", " in the batch script, without srun"
    elif found.num_nodes is not None and found.num_nodes > 1:
        slots = -(-found.world_size // found.num_nodes)
        command = f"ringrun -H host1:{slots},host2:{slots},... --min-ranks 1"
    reason = (
        "without --min-ranks"
        if found.launcher == "ringrun"
        else "and ends all of them when one dies"
    )
    raise ConfigurationError(
        f"{found.launcher} started these {found.world_size} ranks {reason}. An elastic strategy "
        f"needs a process that outlives its ranks: use `{command} python train.py`{note}; on one "
        "host plain `python train.py` also works. Or use strategy='ring'."
    )


def tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` as Slurm writes it: ``[2, 2, 2, 1]``. Empty if ``text`` has another form."""
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
        raise RankDiscoveryError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR to the first node."
        )
    return "".join(part or "" for part in match.groups())


def _of_torch(environ: Environ, launcher: str) -> LaunchVariables:
    rank, world_size, local_rank, local_size = _required(environ, _TORCHRUN, launcher)
    node_rank = _number(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = _number(environ, "NODE_RANK")
    num_nodes = _number(environ, "GROUP_WORLD_SIZE")
    # By hand, ranks come in blocks of one size.
    if local_size > 0 and world_size % local_size == 0:
        node_rank = rank // local_size if node_rank is None else node_rank
        num_nodes = world_size // local_size if num_nodes is None else num_nodes
    if node_rank is None or num_nodes is None:
        raise RankDiscoveryError(
            f"{launcher}: WORLD_SIZE={world_size} is not a multiple of "
            f"LOCAL_WORLD_SIZE={local_size}, so the nodes cannot be numbered. Set GROUP_RANK (this "
            "node's number) and GROUP_WORLD_SIZE (how many nodes)."
        )
    return LaunchVariables(
        "torchrun", launcher, rank, world_size, local_rank, local_size, node_rank, num_nodes
    )


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise RankDiscoveryError(
            f"{name}={text!r} is not a number; a launcher sets it to 0 or more. Unset it, or fix "
            "it."
        )
    return int(text)


def _required(environ: Environ, names: Sequence[str], launcher: str) -> list[int]:
    numbers: list[int] = []
    for name in names:
        value = _number(environ, name)
        if value is None:
            found = ", ".join(f"{other}={environ[other]}" for other in names if other in environ)
            raise RankDiscoveryError(
                f"{launcher}: {name} is not set, but {found or 'none of them'} is. All of "
                f"{', '.join(names)} are needed: start the ranks with mpirun, srun, torchrun or "
                "ringrun, or unset what is left of another launcher."
            )
        numbers.append(value)
    return numbers


def _check_ranges(found: LaunchVariables) -> None:
    pairs = (
        ("rank", found.rank, "the world size", found.world_size),
        ("local rank", found.local_rank, "the ranks of this node", found.local_size),
        ("node rank", found.node_rank, "the number of nodes", found.num_nodes),
        ("rank of this node", found.local_rank, "the world size", found.world_size),
    )
    for name, rank, size_name, size in pairs:
        if rank is not None and size is not None and rank >= size:
            raise RankDiscoveryError(
                f"{found.launcher}: its variables say {name} {rank}, but {size_name} is {size}. "
                "Two launchers may be mixed: start the ranks with one of them, and unset the "
                "variables of the other."
            )
