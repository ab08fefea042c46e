"""``trainer.model.no_sync()``: gradient accumulation in manual optimization, as with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

_NAME = "no_sync"


class NoSync:
    """The attribute ``no_sync`` of the module in training. A copied or pickled one does nothing."""

    def __init__(self, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._block_backward_sync = block_backward_sync

    def __call__(self) -> AbstractContextManager[None]:
        """Around backwards that leave gradients local. The next backward outside sends them."""
        return self._block_backward_sync()

    def __reduce__(self) -> Any:
        return partial, (nullcontext,)


def add_no_sync(module: nn.Module, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
    """Give ``module`` the method, unless it has an attribute of that name."""
    if not hasattr(module, _NAME):
        vars(module)[_NAME] = NoSync(block_backward_sync)


def remove_no_sync(module: nn.Module) -> None:
    """Undo `add_no_sync`. An attribute of the user stays."""
    if isinstance(vars(module).get(_NAME), NoSync):
        del vars(module)[_NAME]
