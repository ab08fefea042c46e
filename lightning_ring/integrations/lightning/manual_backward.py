"""Meaning of a plain ``loss.backward()`` in a module with manual optimization: training, or another purpose."""

from __future__ import annotations

import inspect
from types import CodeType

from lightning.pytorch import LightningModule


def calls_manual_backward(module: LightningModule) -> bool:
    """Whether code of the module's class names ``manual_backward``.

    If so, a plain ``loss.backward()`` has another purpose (an adversarial example, a saliency map) and stays local, as
    under DDP. If not, plain backwards are the training.
    """
    return any(
        "manual_backward" in code.co_names
        for owner in type(module).__mro__[: type(module).__mro__.index(LightningModule)]
        for value in vars(owner).values()
        for code in _codes(getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None))
    )


def _codes(code: CodeType | None) -> list[CodeType]:
    """``code`` and the code of nested functions."""
    if code is None:
        return []
    return [code, *(inner for const in code.co_consts if isinstance(const, CodeType) for inner in _codes(const))]
