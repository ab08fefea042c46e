"""The saved position of loaders that resume: it counts trained batches, not fetched batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


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
