"""`DistributedOptimizer(op=Adasum)`: each rank steps by itself, and the ranks' steps are
combined by Adasum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.horovod.collectives import Adasum, check_adasum, start_reduction, synchronize
from lightning_ring.horovod.context import ProcessSet


class Deltas:
    """What a step has added to the parameters of one optimizer, combined over the ranks after the
    step.

    Gradients stay this rank's own, summed over the backwards since `zero_grad`. A rank whose step
    left a parameter as it was takes part with zeros.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named: list[tuple[str, Parameter]],
        process_set: ProcessSet,
        compression: Any,
    ) -> None:
        check_adasum([param for _, param in named if param.requires_grad], process_set)
        self._named = named
        self._process_set = process_set
        self._compression = compression
        self._starts: list[tuple[str, Parameter, Tensor]] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.synchronize = lambda: None  # type: ignore[attr-defined]
        optimizer.skip_synchronize = self.skip_synchronize  # type: ignore[attr-defined]
        optimizer.set_backward_passes_per_step = lambda passes: None  # type: ignore[attr-defined]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield

    @torch.no_grad()
    def _before_step(self, *ignored: Any) -> None:
        self._starts = [
            (name, param, param.detach().clone())
            for name, param in self._named
            if param.requires_grad
        ]

    @torch.no_grad()
    def _after_step(self, *ignored: Any) -> None:
        sent = []
        for name, param, start in self._starts:
            short, context = self._compression.compress(param - start)
            handle = start_reduction(
                "allreduce",
                [short],
                f"adasum.{name}",
                Adasum,
                1.0,
                1.0,
                self._process_set,
                in_place=True,
            )
            sent.append((handle, context))
        for (handle, context), (_, param, start) in zip(sent, self._starts, strict=True):
            param.copy_(start.add_(self._compression.decompress(synchronize(handle), context)))
        self._starts = []
