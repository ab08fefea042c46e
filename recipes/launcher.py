"""What the variables of a launcher say of this process, before torch is imported. Lightning's
DDP sets few of them.
"""

from __future__ import annotations

import os

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import launcher_variables

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def launcher_rank() -> int:
    """This process's rank; 0 where there is no launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def launcher_size() -> int | None:
    """The ranks that a launcher started; `None` where there is no launcher."""
    try:
        variables = launcher_variables(os.environ)
    except RankDiscoveryError:  # a rank of DDP, or a contradiction that RingStrategy explains
        size = os.environ.get("WORLD_SIZE", "")
        return int(size) if size.isdigit() else None
    return None if variables is None else variables.world_size
