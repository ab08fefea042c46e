"""torchrun's variables without torchrun: job scripts and other platforms export them."""

from __future__ import annotations

from lightning_ring.job.launchers.torchrun import NAMES, rank_and_world_size
from lightning_ring.job.launchers.variables import Environ, LaunchVariables


def exported_variables(environ: Environ) -> LaunchVariables | None:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    Inside a Slurm job they count only if all four are set: a cluster's prologue, or a job script,
    sets some of them for another program.
    """
    if "SLURM_JOB_ID" in environ and not all(name in environ for name in NAMES):
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return (
        rank_and_world_size(environ, "RANK, WORLD_SIZE")
        if any(name in environ for name in names)
        else None
    )
