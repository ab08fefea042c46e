"""States in Lightning's checkpoints: optimizers, algorithm, random generators and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import load_optimizer_state_dict
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import broadcast_optimizer_state
from lightning_ring.host.random_state import collect_random_state, restore_random_state

_RANDOM_KEY = "lightning_ring"
_ALGORITHM_KEY = "lightning_ring_algorithm"


class SavedStates:
    """Every rank's random state, and the algorithm's, such as a compressor's residuals.

    They are kept from loading until the training begins.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def save_random(self, checkpoint: dict[str, Any], comm: Communicator | None) -> None:
        """Add all ranks' random states to rank 0's ``checkpoint`` unless it has only weights.
        Collective.

        Without ``comm`` only this rank's is saved.
        """
        random = collect_random_state()
        states = (
            comm.all_gather_object(random, name="save_checkpoint, random states")
            if comm is not None
            else [random]
        )
        if "optimizer_states" in checkpoint:
            checkpoint[_RANDOM_KEY] = {"random_states": states}

    def save_algorithm(self, checkpoint: dict[str, Any], algorithm: Algorithm) -> None:
        """Add its state to rank 0's ``checkpoint``, unless that has only weights. Collective."""
        if "optimizer_states" in checkpoint and (state := algorithm.state_dict()):
            checkpoint[_ALGORITHM_KEY] = state

    def load(self, checkpoint: dict[str, Any]) -> None:
        self._loaded = {key: checkpoint.get(key, {}) for key in (_RANDOM_KEY, _ALGORITHM_KEY)}

    def restore(self, algorithm: Algorithm, rank: int, world_size: int) -> None:
        """Restore ``algorithm`` and the random state of ``rank``. Warns if that is impossible."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if problem := algorithm.load_state_dict(loaded[_ALGORITHM_KEY]):
            rank_zero_warn(f"lightning_ring: {problem}")
        states = loaded[_RANDOM_KEY].get("random_states")
        if states is not None and len(states) == world_size:
            restore_random_state(states[rank])
        elif states is not None:
            rank_zero_warn(
                f"lightning_ring: the checkpoint holds the random states of {len(states)} ranks, "
                f"this job has {world_size}. They are not restored: dropout and augmentation draw "
                "other numbers than they would have without the interruption."
            )


def load_optimizer_states(
    states: Sequence[dict[str, Any]],
    optimizers: Sequence[Optimizer],
    algorithm: Algorithm,
    device: torch.device,
    comm: Communicator | None,
) -> None:
    """Give ``optimizers`` the ``states``; rank 0's to all ranks of ``comm``. Collective."""
    held = [pair for pair in zip(optimizers, states, strict=False) if pair[1]]
    if len(held) < min(len(optimizers), len(states)):
        rank_zero_warn(
            "lightning_ring: the checkpoint holds no state for some of the optimizers "
            "(ring_sharded leaves it out of checkpoints after an exception). These optimizers "
            "start without state."
        )
    for optimizer, state in held:
        load_optimizer_state_dict(algorithm, optimizer, state)
        if not algorithm.sharded:
            _optimizer_to_device(optimizer, device)
    if comm is not None and not algorithm.sharded:
        for optimizer in optimizers:
            broadcast_optimizer_state(optimizer, comm)


def count_trained_batches(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Correct the loaders' states in ``checkpoint`` for batches fetched but not trained on.

    There is such a batch when the job is told to stop, or when a step raises.
    """
    fit_loop, loops = trainer.fit_loop, checkpoint.get("loops")
    combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
    if loops is None or combined is None or fetcher is None:
        return
    states = loops["fit_loop"]["state_dict"].get("combined_loader", [])
    with_state = [loader for loader in combined.flattened if isinstance(loader, _Stateful)]
    progress: Any = fit_loop.epoch_loop.batch_progress.current
    not_trained = max(0, fetcher.fetched - progress.processed)
    for index, loader in enumerate(with_state[: len(states)]):
        if hasattr(loader, "trained_state"):
            states[index] = loader.trained_state(not_trained)
