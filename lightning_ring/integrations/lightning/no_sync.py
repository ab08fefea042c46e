"""``trainer.model.no_sync()``, with which scripts for DistributedDataParallel accumulate in manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

_NAME = "no_sync"


class NoSync:
    """The attribute ``no_sync`` of a module that is being trained. A copy of it, or a pickled one, does nothing."""

    def __init__(self, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._block_backward_sync = block_backward_sync

    def __call__(self) -> AbstractContextManager[None]:
        """Backward inside leaves gradients local; they travel with the next backward outside."""
        return self._block_backward_sync()

    def __reduce__(self) -> Any:
        return partial, (nullcontext,)


def add_no_sync(module: nn.Module, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
    """Give ``module`` the method, unless it has an attribute of that name."""
    if not hasattr(module, _NAME):
        vars(module)[_NAME] = NoSync(block_backward_sync)


def remove_no_sync(module: nn.Module) -> None:
    """After `add_no_sync`; an attribute of the user's stays."""
    if isinstance(vars(module).get(_NAME), NoSync):
        del vars(module)[_NAME]
