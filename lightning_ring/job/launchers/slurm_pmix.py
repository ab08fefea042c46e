"""``srun --mpi=pmix``: PMIx gives the rank, Slurm the sizes. (mpirun, which also speaks PMIx, is
asked before.)
"""

from __future__ import annotations

from dataclasses import replace

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers.slurm import slurm_variables
from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number


def slurm_pmix_variables(environ: Environ) -> LaunchVariables | None:
    if "PMIX_RANK" not in environ or "PMIX_NAMESPACE" not in environ:
        return None
    slurm = slurm_variables(environ)
    if slurm is None:
        return None
    rank = number(environ, "PMIX_RANK")
    if rank != slurm.rank:
        raise RankDiscoveryError(
            f"srun --mpi=pmix: PMIX_RANK={rank}, but SLURM_PROCID={slurm.rank}. Start the ranks "
            "with one launcher only."
        )
    return replace(slurm, source="mpi", launcher="srun --mpi=pmix")
