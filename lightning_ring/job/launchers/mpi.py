"""mpirun of each MPI library: rank and world size, and for some those of the node."""

from __future__ import annotations

from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number, required

_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_VARIABLES = {  # by the launcher's name
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _NUMBERS),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in _NUMBERS),
    # Hydra, the mpirun of MPICH and Intel MPI, and ``srun --mpi=pmi2``: all set the same variables
    "PMI (MPICH, Intel MPI, Slurm's pmi2)": (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
}


def mpi_variables(environ: Environ) -> LaunchVariables | None:
    """Those of the first library of which rank or world size is set, else ``None``."""
    for launcher, names in _VARIABLES.items():
        needed, of_node = names[:2], names[2:]
        if any(name in environ for name in needed):
            rank, world_size = (required(environ, name, needed, launcher) for name in needed)
            return LaunchVariables(
                "mpi", launcher, rank, world_size, *(number(environ, name) for name in of_node)
            )
    return None
