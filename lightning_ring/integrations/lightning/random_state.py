"""Every rank's random state in checkpoints, for exact resumes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.host.random_state import collect_random_state, restore_random_state

_CHECKPOINT_KEY = "lightning_ring"


class RandomStates:
    """Saves the ranks' random states in checkpoints, and restores them."""

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] | None = None

    def save(self, checkpoint: dict[str, Any], comm: Communicator | None) -> None:
        """Add every rank's state to rank 0's ``checkpoint``. Collective; without ``comm`` only this rank's state."""
        state = collect_random_state()
        states = comm.all_gather_object(state) if comm is not None else [state]
        if "optimizer_states" in checkpoint:  # not if it contains only weights
            checkpoint[_CHECKPOINT_KEY] = {"random_states": states}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the states in ``checkpoint`` until `restore`."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY, {}).get("random_states")

    def restore(self, rank: int, world_size: int) -> None:
        """Restore the state of ``rank``. Warns if the checkpoint is of another world size."""
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != world_size:
            rank_zero_warn(
                f"lightning_ring: the checkpoint holds the random states of {len(states)} ranks, this job has "
                f"{world_size}. They are not restored: dropout and augmentation draw other numbers than they would "
                "have without the interruption."
            )
            return
        restore_random_state(states[rank])
