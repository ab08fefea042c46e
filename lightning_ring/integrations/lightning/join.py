"""Whose batch counts: a rank that ran out of data goes on with the others, and leaves no trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ring.integrations.lightning.uneven import AgreedLoader, BatchStatus, check_join_allowed


class ActiveRanks:
    """Which ranks hold data for the batch at hand. Without an `AgreedLoader` that joins all of them do.

    Attributes:
        loader: The training loader that goes on until the last rank has no data.
        during_step: The current status while a training step runs, else `None`.
    """

    def __init__(self) -> None:
        self.loader: AgreedLoader | None = None
        self.during_step: BatchStatus | None = None
        self._current: BatchStatus | None = None
        self._window_ranks = 0

    @property
    def has_data(self) -> bool:
        return self._current is None or self._current.has_data

    def find_loader(self, trainer: Trainer) -> None:
        """See which of the fit's training loaders joins, if any; another one whenever loaders are reloaded.

        Raises:
            ConfigurationError: This fit cannot join (`check_join_allowed`).
        """
        combined = trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        joining = next((loader for loader in loaders if isinstance(loader, AgreedLoader) and loader.joins), None)
        if joining is not None and joining is not self.loader:
            check_join_allowed(len(loaders), trainer.lightning_module)
        self.loader = joining

    def take(self, batch_idx: int, accumulate_grad_batches: int) -> int | None:
        """Go on to the next batch; returns how many ranks its gradient averages over, `None` where that is all.

        Over several micro-batches a rank counts if it had data for the first: then it holds part of the gradient.
        """
        if self.loader is None:
            self._current = None  # the loader before this one may have ended without data on this rank
            return None
        self._current = self.loader.next_status()
        if batch_idx % accumulate_grad_batches == 0:
            self._window_ranks = self._current.active_ranks
        return self._window_ranks

    @contextmanager
    def step(self, module: LightningModule) -> Iterator[None]:
        """Around a training step."""
        self.during_step = self._current
        try:
            with nullcontext() if self.has_data else _leaving_no_trace(module):
                yield
        finally:
            self.during_step = None


@contextmanager
def _leaving_no_trace(module: LightningModule) -> Iterator[None]:
    """Around the training step of a rank that ran out of data: it repeats its last batch, so that it makes the same
    collective calls as the others (``self.log(..., sync_dist=True)``, ``self.all_gather``), and none of it counts: no
    gradient (its loss is not used), no buffer, no metric, no weight in logged means."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [(metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    log = module.log
    module.log = functools.partial(_log_without_weight, log)  # type: ignore[method-assign]
    try:
        yield  # with gradients enabled: steps that call torch.autograd.grad (penalties, forces) need them
    finally:
        del module.log
        for metric, state in metrics:
            for name, value in state.items():
                setattr(metric, name, value)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # unseen by autograd: a backward may follow


def _metric_state(metric: Metric) -> dict[str, Any]:
    state = {
        name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in metric.metric_state.items()
    }
    return state | {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}


def _log_without_weight(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    log(*args, **(kwargs | {"batch_size": 0}))
