"""torchrun, also as ``python -m torch.distributed.run``."""

from __future__ import annotations

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers.variables import Environ, LaunchVariables, number, required

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def torchrun_variables(environ: Environ) -> LaunchVariables | None:
    return rank_and_world_size(environ, "torchrun") if "TORCHELASTIC_RUN_ID" in environ else None


def rank_and_world_size(environ: Environ, launcher: str) -> LaunchVariables:
    """From torchrun's variables, whoever set them."""
    rank, world_size, local_rank, local_size = (
        required(environ, name, NAMES, launcher) for name in NAMES
    )
    node_rank = number(environ, "GROUP_RANK")
    if node_rank is None:
        node_rank = number(environ, "NODE_RANK")
    num_nodes = number(environ, "GROUP_WORLD_SIZE")
    # ranks in blocks of one size: the only way by hand
    if local_size > 0 and world_size % local_size == 0:
        node_rank = rank // local_size if node_rank is None else node_rank
        num_nodes = world_size // local_size if num_nodes is None else num_nodes
    if node_rank is None or num_nodes is None:
        raise RankDiscoveryError(
            f"{launcher}: WORLD_SIZE={world_size} is not a multiple of "
            f"LOCAL_WORLD_SIZE={local_size}, so the nodes cannot be numbered. Set GROUP_RANK (this "
            "node's number) and GROUP_WORLD_SIZE (how many nodes)."
        )
    return LaunchVariables(
        "torchrun", launcher, rank, world_size, local_rank, local_size, node_rank, num_nodes
    )
