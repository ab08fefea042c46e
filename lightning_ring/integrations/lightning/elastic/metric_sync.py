"""Metric objects, which gather their states through torch's default group, as calls that a death
does not end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_ring.integrations.lightning.elastic.host_calls import HostCalls


@contextmanager
def gathering_through(calls: HostCalls, module: nn.Module) -> Iterator[None]:
    """Gather the states of each metric of ``module`` in one of ``calls``: of the ranks that are
    there, or of all.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    for metric in metrics:
        vars(metric)["_sync_dist"] = _Gathering(metric, calls)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("_sync_dist", None)


class _Gathering:
    """A metric's ``_sync_dist``, which sets its states only after it has gathered all of them."""

    def __init__(self, metric: Metric, calls: HostCalls) -> None:
        self._metric = metric
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        metric = self._metric

        def run() -> dict[str, Any]:
            type(metric)._sync_dist(metric, *args, **kwargs)
            return {name: getattr(metric, name) for name in metric._defaults}

        # another rank's, if this one has missed the end
        for name, state in self._calls.call(run).items():
            setattr(metric, name, state)
