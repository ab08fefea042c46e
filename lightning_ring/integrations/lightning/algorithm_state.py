"""The state of an algorithm, such as residuals of a compressor, in checkpoints."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.algorithms.algorithm import Algorithm

_CHECKPOINT_KEY = "lightning_ring_algorithm"


class AlgorithmState:
    """Saves, loads and later restores the state: Lightning loads a checkpoint before the training begins."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], algorithm: Algorithm) -> None:
        """Add the state to rank 0's ``checkpoint``, unless that contains only weights. Collective."""
        if "optimizer_states" in checkpoint and (state := algorithm.state_dict()):
            checkpoint[_CHECKPOINT_KEY] = state

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state in ``checkpoint`` until `restore`."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY, {})

    def restore(self, algorithm: Algorithm) -> None:
        """Give ``algorithm`` the loaded state. Warns if it cannot continue from it."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and (problem := algorithm.load_state_dict(loaded)):
            rank_zero_warn(f"lightning_ring: {problem}")
