"""Variables that mpirun sets: rank and world size, and for some MPI libraries those of the node."""

from __future__ import annotations

from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number, required


def mpi_variables(
    environ: Environ, launcher: str, rank: str, world_size: str, local_rank: str, local_size: str
) -> LaunchVariables | None:
    """The variables of these names, ``None`` if neither ``rank`` nor ``world_size`` is set."""
    needed = (rank, world_size)
    if not any(name in environ for name in needed):
        return None
    return LaunchVariables(
        "mpi",
        launcher,
        required(environ, rank, needed, launcher),
        required(environ, world_size, needed, launcher),
        number(environ, local_rank),
        number(environ, local_size),
    )
