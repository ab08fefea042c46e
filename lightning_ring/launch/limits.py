"""How many ranks a job has that goes on when ranks die."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.respawn import RespawnLimits
from lightning_ring.membership.silence import SilenceLimits


@dataclass(frozen=True, slots=True)
class ElasticLimits:
    """How many ranks a job has.

    ``ranks`` start; where hosts are discovered, all slots that there are, and at least ``ranks``.
    The job goes on with ``min_ranks`` or more; with fewer it waits ``wait_for_ranks`` seconds for
    others, then ends. It never has more than ``max_ranks``. With ``respawn`` a new process replaces
    a dead one. ``silence`` says when a process that does not answer counts as dead. An agent on
    another host has ``start_seconds`` to come up.
    """

    ranks: int
    min_ranks: int = 1
    max_ranks: int | None = None
    wait_for_ranks: float = 600.0
    respawn: RespawnLimits | None = None
    silence: SilenceLimits = field(default_factory=SilenceLimits)
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        most = self.ranks if self.max_ranks is None else self.max_ranks
        if not 1 <= self.min_ranks <= self.ranks <= most:
            raise ConfigurationError(
                f"{self.ranks} ranks, at least {self.min_ranks} and at most {most}: the numbers "
                "have to ascend, from 1 on. Change the number of ranks, --min-ranks or "
                "--max-ranks."
            )
