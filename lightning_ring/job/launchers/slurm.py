"""srun, and what Slurm's variables say of a job's nodes."""

from __future__ import annotations

import re

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number, required

_FIRST_SPECIAL_STEP = 0xFFFFFF00  # the highest numbers: batch, interactive and other shells


def slurm_variables(environ: Environ) -> LaunchVariables | None:
    """Of a task in an ``srun`` step of several tasks, else ``None``."""
    step = number(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    if number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    needed = (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
    )
    rank, world_size, local_rank, node, num_nodes = (
        required(environ, name, needed, "srun") for name in needed
    )
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(per_node) != num_nodes or sum(per_node) != world_size:
        raise RankDiscoveryError(
            f"srun: SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} does "
            f"not describe SLURM_STEP_NUM_TASKS={world_size} tasks on "
            f"SLURM_STEP_NUM_NODES={num_nodes} nodes. Start the ranks with srun itself, and do not "
            "change its variables."
        )
    local_size = per_node[node] if node < num_nodes else 0
    return LaunchVariables(
        "slurm", "srun", rank, world_size, local_rank, local_size, node, num_nodes
    )


def tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` as Slurm writes it: ``[2, 2, 2, 1]``. Empty where ``text`` is not of that
    form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``"gpu[03-05,9],login"`` gives ``"gpu03"``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise RankDiscoveryError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host. Set MASTER_ADDR to the first node."
        )
    return match[1] + (match[2] or "") + (match[3] or "")
