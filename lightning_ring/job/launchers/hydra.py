"""Hydra, the mpirun of MPICH and Intel MPI, and ``srun --mpi=pmi2``: all set the same variables."""

from __future__ import annotations

from lightning_ring.job.launchers.mpi import mpi_variables
from lightning_ring.job.launchers.variables import Environ, LaunchVariables

PMI = "PMI (MPICH, Intel MPI, Slurm's pmi2)"


def hydra_variables(environ: Environ) -> LaunchVariables | None:
    return mpi_variables(environ, PMI, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
