"""Plain processes of this host that ``ringrun --no-mpi`` or ``python train.py`` started
(`launch.start.plain_job`).
"""

from __future__ import annotations

from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number, required


def ringrun_variables(environ: Environ) -> LaunchVariables | None:
    names = ("RING_RANK", "RING_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    rank, world_size = (required(environ, name, names, "ringrun") for name in names)
    places = {
        "RING_LOCAL_RANK": rank,
        "RING_LOCAL_SIZE": world_size,
        "RING_NODE_RANK": 0,
        "RING_NUM_NODES": 1,
    }
    numbers = [
        default if (value := number(environ, name)) is None else value
        for name, default in places.items()
    ]
    return LaunchVariables("ringrun", "ringrun", rank, world_size, *numbers)
