"""Weights that code other than an optimizer changes: in a step that is done again, in a
validation that runs again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ring.comm.communicator import as_integers
from lightning_ring.elastic.undo import remember_values

_STARTS = ("on_validation_start", "on_validation_epoch_start")
_EXCHANGING = tuple(
    getattr(of_lightning, name)
    for name in ("LambdaCallback", "WeightAveraging")
    if hasattr(of_lightning, name)
)
_OF_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_ring.")


def remember_exchanged_weights(
    trainer: pl.Trainer, module: pl.LightningModule
) -> Callable[[], None]:
    """Keep what hooks may exchange for the time of a validation, which would exchange it once more.

    A copy of the module, and of tensors and modules in the attributes of callbacks with such hooks;
    of nothing where there is no such hook. The returned function restores it.
    """
    callbacks = [callback for callback in trainer.callbacks if _may_exchange(callback)]  # type: ignore[attr-defined]
    if not callbacks and not _overrides(module, pl.LightningModule):
        return lambda: None
    attributes = [
        {name: _copied(value) for name, value in vars(callback).items()} for callback in callbacks
    ]
    held = [leaf for callback in callbacks for leaf in tree_leaves(list(vars(callback).values()))]
    modules = [module, *(leaf for leaf in held if isinstance(leaf, nn.Module))]
    tensors = chain.from_iterable(chain(part.parameters(), part.buffers()) for part in modules)
    restore_values = remember_values(
        [*tensors, *(leaf for leaf in held if isinstance(leaf, Tensor))]
    )

    def restore() -> None:
        restore_values()
        for callback, values in zip(callbacks, attributes, strict=True):
            vars(callback).update({name: _copied(value) for name, value in values.items()})

    return restore


class ChangedInSteps:
    """Finds the parameters that a step changes before its optimizer does, such as those of a
    momentum encoder.

    It compares sums of all parameters in steps 1, 2, 4, 8 and so on of this process. What it has
    found is restored from the next step on, where a step is done again.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._found: dict[int, nn.Parameter] = {}  # by id
        self._before: tuple[list[nn.Parameter], list[int]] | None = None

    def begin_step(self, module: nn.Module) -> Callable[[], None]:
        """Keep the values of those that were found; the returned function restores them."""
        self._num_steps += 1
        self._before = None
        if self._num_steps & (self._num_steps - 1) == 0:
            others = [
                param
                for param in module.parameters()
                if id(param) not in self._found and _is_dense(param)
            ]
            self._before = others, _sums(others)
        return remember_values(self._found.values())

    def end_step(self) -> None:
        """Before the optimizer's step."""
        if self._before is not None:
            params, sums = self._before
            now = _sums(params)
            self._found |= {
                id(param): param
                for param, old, new in zip(params, sums, now, strict=True)
                if old != new
            }
            self._before = None


def _may_exchange(callback: Callback) -> bool:
    known = type(callback).__module__.startswith(_OF_LIBRARIES)
    return _overrides(callback, Callback) and (not known or isinstance(callback, _EXCHANGING))


def _overrides(one: Any, kind: type) -> bool:
    """Whether ``one``, of ``kind``, has a hook of its own at the start of a validation."""
    return any(
        getattr(getattr(one, name), "__func__", None) is not getattr(kind, name) for name in _STARTS
    )


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _is_dense(param: Tensor) -> bool:
    return (
        param.is_floating_point()
        and param.layout == torch.strided
        and not nn.parameter.is_lazy(param)
    )


@torch.no_grad()
def _sums(params: Iterable[Tensor]) -> list[int]:
    """Of the bits of each, as integers."""
    return [int(as_integers(param.detach()).sum(dtype=torch.int64)) for param in params]
