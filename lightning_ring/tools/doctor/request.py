"""What the doctor is asked about."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

# What a launcher tells its ranks. The ranks that the doctor starts are not those, and get variables of their own.
_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MV2_COMM_WORLD_", "TORCHELASTIC_")
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "RING_RANK", "RING_WORLD_SIZE", "RING_STORE", "RING_STORE_FD", "RING_JOB"),
    *("RING_LAUNCHER_PID", "RING_STOP_SIGNAL"),
)
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")  # the user's own, unless one of these started this process
_OPEN_MPI = ("mpirun", "mpiexec", "prterun", "prted", "orted")


@dataclass(frozen=True, slots=True)
class Request:
    """``ranks`` are those meant to run on this host, ``seconds`` the limit of each run of ranks and of every question.

    ``launcher`` is what started this process as a rank, by name, or empty; ``part``: one of several
    hosts that another doctor asks about.
    """

    ranks: int
    num_hosts: int
    seconds: float
    launcher: str = ""
    part: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def at_most(self, seconds: float) -> float:
        return min(seconds, self.seconds)

    @property
    def child_environ(self) -> dict[str, str]:
        """The environment for processes that the doctor starts: without what a launcher told this one."""
        return {name: value for name, value in self.environ.items() if not self._is_launchers(name)}

    def _is_launchers(self, name: str) -> bool:
        if name.startswith(_SETTINGS):
            return self.launcher in _OPEN_MPI
        return name in _NAMES or name.startswith(_PREFIXES)
