"""Additions to Lightning's checkpoints: random states, the algorithm's state, and the true position of loaders."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator
from lightning_ring.host.random_state import collect_random_state, restore_random_state

_RANDOM_KEY = "lightning_ring"
_ALGORITHM_KEY = "lightning_ring_algorithm"


class SavedStates:
    """Every rank's random state, for exact resumes, and the state of the algorithm, such as a compressor's residuals.

    Lightning loads a checkpoint before the training begins: states are kept until they are restored.
    """

    def __init__(self) -> None:
        self._random: list[dict[str, Any]] | None = None
        self._algorithm: dict[str, Any] | None = None

    def save(self, checkpoint: dict[str, Any], algorithm: Algorithm, comm: Communicator | None) -> None:
        """Add all states to rank 0's ``checkpoint``, unless that contains only weights. Collective.

        Without ``comm`` only this rank's random state is saved.
        """
        random = collect_random_state()
        states = comm.all_gather_object(random) if comm is not None else [random]
        if "optimizer_states" in checkpoint:
            checkpoint[_RANDOM_KEY] = {"random_states": states}
            if comm is not None and (state := algorithm.state_dict()):
                checkpoint[_ALGORITHM_KEY] = state

    def load(self, checkpoint: dict[str, Any]) -> None:
        self._random = checkpoint.get(_RANDOM_KEY, {}).get("random_states")
        self._algorithm = checkpoint.get(_ALGORITHM_KEY, {})

    def restore_algorithm(self, algorithm: Algorithm) -> None:
        """Give ``algorithm`` the loaded state. Warns if it cannot continue from it."""
        loaded, self._algorithm = self._algorithm, None
        if loaded is not None and (problem := algorithm.load_state_dict(loaded)):
            rank_zero_warn(f"lightning_ring: {problem}")

    def restore_random(self, rank: int, world_size: int) -> None:
        """Restore the random state of ``rank``. Warns if the checkpoint is of another world size."""
        states, self._random = self._random, None
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


def count_trained_batches(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Correct the loaders' states in ``checkpoint`` for batches that were fetched but not trained on.

    There is such a batch when the job is told to stop, or when a step raises and a callback saves a checkpoint.
    """
    fit_loop = trainer.fit_loop
    loaders = fit_loop._combined_loader.flattened if fit_loop._combined_loader is not None else []
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    with_state = [loader for loader in loaders if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]
    if fit_loop._data_fetcher is None:
        return
    progress: Any = fit_loop.epoch_loop.batch_progress.current
    not_trained = max(0, fit_loop._data_fetcher.fetched - progress.processed)
    for index, loader in enumerate(with_state[: len(states)]):
        if hasattr(loader, "trained_state"):
            states[index] = loader.trained_state(not_trained)
