"""Manual optimization: ``trainer.model.no_sync()``, and the meaning of a plain
``loss.backward()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

_NAME = "no_sync"


class NoSync:
    """The attribute ``no_sync`` of the module in training, for gradient accumulation as with
    DistributedDataParallel.

    A copied or pickled one does nothing.
    """

    def __init__(self, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._block_backward_sync = block_backward_sync

    def __call__(self) -> AbstractContextManager[None]:
        """Around backwards that leave gradients local. The next backward outside sends them."""
        return self._block_backward_sync()

    def __reduce__(self) -> Any:
        return partial, (nullcontext,)


def add_no_sync(
    module: nn.Module, block_backward_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    """Give ``module`` the method, unless it has an attribute of that name."""
    if not hasattr(module, _NAME):
        vars(module)[_NAME] = NoSync(block_backward_sync)


def remove_no_sync(module: nn.Module) -> None:
    """Undo `add_no_sync`. An attribute of the user stays."""
    if isinstance(vars(module).get(_NAME), NoSync):
        del vars(module)[_NAME]


def calls_manual_backward(module: LightningModule) -> bool:
    """Whether code of the module's class names ``manual_backward``.

    If so, a plain ``loss.backward()`` has another purpose (an adversarial example, a saliency map)
    and stays local, as under DDP. If not, plain backwards are the training.
    """
    return any(
        "manual_backward" in code.co_names
        for owner in type(module).__mro__[: type(module).__mro__.index(LightningModule)]
        for value in vars(owner).values()
        for code in _codes(
            getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
        )
    )


def _codes(code: CodeType | None) -> list[CodeType]:
    """``code`` and the code of nested functions."""
    if code is None:
        return []
    return [
        code,
        *(
            inner
            for const in code.co_consts
            if isinstance(const, CodeType)
            for inner in _codes(const)
        ),
    ]
