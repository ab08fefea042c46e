"""mpirun of MVAPICH."""

from __future__ import annotations

from lightning_ring.job.launchers.mpi import mpi_variables
from lightning_ring.job.launchers.variables import Environ, LaunchVariables


def mvapich_variables(environ: Environ) -> LaunchVariables | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return mpi_variables(environ, "MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in names))
