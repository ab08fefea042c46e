"""``uneven="join"``: ranks without data repeat a batch, whose gradient counts as zero.

Ranks compare the lengths of their training loaders when Lightning sets them up. Equal lengths need
nothing. Different lengths are an error on every rank under ``uneven="error"``. Under ``"join"``,
and for iterable data sets, whose length is unknown, all ranks exchange at every batch whether they
have one. The repeated batch makes the same collective calls in ``training_step`` and does not
count: no gradient, no buffer, no weight in logged means. Metric objects that count by themselves do
see it. With several training loaders the number of combined batches counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_ring.integrations.lightning.data import (
    AgreedLoader,
    BatchStatus,
    check_join_allowed,
)


class ActiveRanks:
    """The ranks that have data for the current batch: all ranks, unless a loader joins
    (`AgreedLoader.joins`).
    """

    def __init__(self) -> None:
        self.loader: AgreedLoader | None = None  # that continues until no rank has data
        self.during_step: BatchStatus | None = None  # the current status while a training step runs
        self._current: BatchStatus | None = None
        self._window_ranks = 0

    @property
    def has_data(self) -> bool:
        return self._current is None or self._current.has_data

    def find_loader(self, trainer: Trainer) -> None:
        """Find the fit's training loader that joins, if any. Reloading loaders may change it."""
        combined = trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        joining = next(
            (loader for loader in loaders if isinstance(loader, AgreedLoader) and loader.joins),
            None,
        )
        if joining is not None and joining is not self.loader:
            check_join_allowed(len(loaders), trainer.lightning_module)
        self.loader = joining

    def take(self, batch_idx: int, accumulate_grad_batches: int) -> int | None:
        """Take the next batch. Returns the number of ranks that its gradient averages over, `None`
        for all.

        With gradient accumulation a rank counts if it had data for the first micro-batch.
        """
        if self.loader is None:
            self._current = None  # an earlier loader may have ended without data on this rank
            return None
        self._current = self.loader.next_status()
        if batch_idx % accumulate_grad_batches == 0:
            self._window_ranks = self._current.active_ranks
        return self._window_ranks

    @contextmanager
    def step(self, module: LightningModule) -> Iterator[None]:
        self.during_step = self._current
        try:
            with nullcontext() if self.has_data else _discarding_effects(module):
                yield
        finally:
            self.during_step = None


@contextmanager
def _discarding_effects(module: LightningModule) -> Iterator[None]:
    """Around the training step of a rank without data, which repeats its last batch.

    The step makes the same collective calls as on other ranks (``self.log(..., sync_dist=True)``,
    ``self.all_gather``). It has no effect on gradients (its loss is not used), buffers, metrics or
    logged means.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [
        (metric, _metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)
    ]
    log = module.log
    module.log = functools.partial(_log_without_weight, log)  # type: ignore[method-assign]
    try:
        yield  # with gradients enabled, for steps that call torch.autograd.grad (penalties, forces)
    finally:
        del module.log
        for metric, state in metrics:
            for name, value in state.items():
                setattr(metric, name, value)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # without autograd: a backward may follow


def _metric_state(metric: Metric) -> dict[str, Any]:
    state = {
        name: value.clone() if isinstance(value, Tensor) else list(value)
        for name, value in metric.metric_state.items()
    }
    return state | {
        name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")
    }


def _log_without_weight(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    log(*args, **(kwargs | {"batch_size": 0}))
