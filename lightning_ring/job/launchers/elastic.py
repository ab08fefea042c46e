"""Processes that a steward started, which outlives them (`launch.elastic`), and launchers that
cannot do so.
"""

from __future__ import annotations

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.job.launchers.variables import Environ


def started_by_steward(environ: Environ) -> bool:
    """Whether a steward started this process; `False` if no launcher did, so that it may start
    ranks itself.

    Raises:
        ConfigurationError: Another launcher did.
    """
    if "RING_STEWARD" in environ:
        return True
    found = launcher_variables(environ)
    if found is None:
        return False
    command, note = f"ringrun -n {found.world_size} --min-ranks 1", ""
    if found.source == "slurm":
        command, note = "ringrun --min-ranks 1", " in the batch script, without srun"
    elif found.num_nodes is not None and found.num_nodes > 1:
        slots = -(-found.world_size // found.num_nodes)
        command = f"ringrun -H host1:{slots},host2:{slots},... --min-ranks 1"
    reason = (
        "without --min-ranks"
        if found.launcher == "ringrun"
        else "and ends all of them when one dies"
    )
    raise ConfigurationError(
        f"{found.launcher} started these {found.world_size} ranks {reason}. An elastic strategy "
        f"needs a process that outlives its ranks: use `{command} python train.py`{note}; on one "
        "host plain `python train.py` also works. Or use strategy='ring'."
    )
