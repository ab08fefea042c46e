"""Plain processes of this host that ``ringrun --no-mpi`` or ``python train.py`` started (`launch.start.plain_job`)."""

from __future__ import annotations

from lightning_ring.job.launchers.variables import Environ, LaunchVariables, required


def ringrun_variables(environ: Environ) -> LaunchVariables | None:
    names = ("RING_RANK", "RING_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    rank, world_size = (required(environ, name, names, "ringrun") for name in names)
    return LaunchVariables("ringrun", "ringrun", rank, world_size, rank, world_size, 0, 1)
