"""mpirun of Open MPI."""

from __future__ import annotations

from lightning_ring.job.launchers.mpi import mpi_variables
from lightning_ring.job.launchers.variables import Environ, LaunchVariables

OPEN_MPI = "Open MPI"


def open_mpi_variables(environ: Environ) -> LaunchVariables | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return mpi_variables(environ, OPEN_MPI, *(f"OMPI_COMM_WORLD_{name}" for name in names))
