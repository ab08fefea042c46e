"""The value that a launcher's file returns, and the reading of numbers from environment
variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ring.errors import RankDiscoveryError

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LaunchVariables:
    """Rank and sizes of one process as its launcher states them; ``None`` where only MPI knows.

    ``source`` is as in `RankInfo`; ``launcher`` is the launcher's name in messages.
    """

    source: str
    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None


def number(environ: Environ, name: str) -> int | None:
    """The variable ``name`` as a number, ``None`` where it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not text.strip().isdigit():
        raise RankDiscoveryError(
            f"{name}={text!r} is not a number; a launcher sets it to 0 or more. Unset it, or fix "
            "it."
        )
    return int(text)


def required(environ: Environ, name: str, needed: Sequence[str], launcher: str) -> int:
    """The variable ``name``, one of those ``needed`` together."""
    value = number(environ, name)
    if value is None:
        found = (
            ", ".join(f"{other}={environ[other]}" for other in needed if other in environ)
            or "none of them"
        )
        raise RankDiscoveryError(
            f"{launcher}: {name} is not set, but {found} is. All of {', '.join(needed)} are "
            "needed: start the ranks with mpirun, srun, torchrun or ringrun, or unset what is "
            "left of another launcher."
        )
    return value


def check_ranges(found: LaunchVariables) -> None:
    """Raise `RankDiscoveryError` if a rank is not below the size that it counts in."""
    pairs = (
        ("rank", found.rank, "the world size", found.world_size),
        ("local rank", found.local_rank, "the ranks of this node", found.local_size),
        ("node rank", found.node_rank, "the number of nodes", found.num_nodes),
        ("rank of this node", found.local_rank, "the world size", found.world_size),
    )
    for name, rank, size_name, size in pairs:
        if rank is not None and size is not None and rank >= size:
            raise RankDiscoveryError(
                f"{found.launcher}: its variables say {name} {rank}, but {size_name} is {size}. "
                "Two launchers may be mixed: start the ranks with one of them, and unset the "
                "variables of the other."
            )
