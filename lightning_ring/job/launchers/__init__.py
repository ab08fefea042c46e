"""Rank and sizes of this process, read from its launcher's environment variables.

Each launcher is one file with one function that returns `LaunchVariables`, or ``None`` if another
launcher started the process, and one line in ``_READERS``; the mpirun of an MPI library is one line
of a table in ``mpi.py``. These are pure functions: nothing is imported or opened.

The nearest launcher counts. torchrun and ringrun are often started inside an MPI or a Slurm job,
and mpirun inside a Slurm job, never the other way round: that is the order of ``_READERS``.
(Lightning asks Slurm before MPI, and inside a batch job takes every rank of mpirun for rank 0.)
"""

from __future__ import annotations

from lightning_ring.job.launchers.exported import exported_variables
from lightning_ring.job.launchers.mpi import mpi_variables
from lightning_ring.job.launchers.ringrun import ringrun_variables
from lightning_ring.job.launchers.slurm import slurm_variables
from lightning_ring.job.launchers.slurm_pmix import slurm_pmix_variables
from lightning_ring.job.launchers.torchrun import torchrun_variables
from lightning_ring.job.launchers.variables import Environ, LaunchVariables, check_ranges

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

    A Slurm batch shell, an interactive step and an ``srun`` of one task are one process without a
    launcher.

    Raises:
        RankDiscoveryError: The launcher's variables are incomplete, not numbers, or contradict each
            other.
    """
    # the nearest of all: other launchers' variables are those of the steward's process
    if "RING_STEWARD" in environ:
        return ringrun_variables(environ)
    for read in _READERS:
        if (found := read(environ)) is not None:
            check_ranges(found)
            return found
    return None
