"""Loaders that resume: their saved position counts the batches that were trained on, not those that were fetched."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def count_trained_batches(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Correct the loaders' states in ``checkpoint``: a batch may have been fetched that training stopped before.

    So it is when the job is told to stop, or when a step raises and a callback saves what there is.
    """
    fit_loop = trainer.fit_loop
    loaders = fit_loop._combined_loader.flattened if fit_loop._combined_loader is not None else []
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    with_state = [loader for loader in loaders if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]
    if fit_loop._data_fetcher is None:
        return
    progress: Any = fit_loop.epoch_loop.batch_progress.current
    not_trained = max(0, fit_loop._data_fetcher.fetched - progress.processed)
    for place, loader in enumerate(with_state[: len(states)]):
        if hasattr(loader, "trained_state"):
            states[place] = loader.trained_state(not_trained)
