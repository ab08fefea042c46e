"""What a compressor keeps from step to step, for checkpoints that resume where they stopped."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.compression import Compressor

_CHECKPOINT_KEY = "lightning_ring_compression"


class CompressionState:
    """Carries a compressor's state into a checkpoint, and out of one."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], comm: Communicator | None, compressor: Compressor | None) -> None:
        """Add it to rank 0's ``checkpoint``, unless that holds weights only. Collective; without ``comm`` nothing."""
        if compressor is None or comm is None or "optimizer_states" not in checkpoint:
            return
        if state := compressor.state_dict(comm):
            checkpoint[_CHECKPOINT_KEY] = {"compressor": compressor.name, "state": state}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep what is in ``checkpoint`` until `restore`."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY, {})

    def restore(self, compressor: Compressor | None, rank: int, world_size: int) -> None:
        """Give ``compressor`` the state that was loaded; warns where it cannot go on from it."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or compressor is None:
            return
        state = loaded["state"] if loaded.get("compressor") == compressor.name else {}
        problem = compressor.load_state_dict(state, rank, world_size)
        if problem:
            rank_zero_warn(f"lightning_ring: {problem}")
