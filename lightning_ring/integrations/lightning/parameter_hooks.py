"""Waiting for all-gathers in hooks between two training steps, which may read parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")
_ALONE = ("on_exception", "on_load_checkpoint")  # on one rank alone, or with nothing to wait for
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MODULE_HOOKS = (*_EACH_BATCH, *_TRANSFERS, "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
_BEFORE_VALIDATION = ("val_dataloader", "on_validation_model_zero_grad", "on_validation_model_eval")
_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step")  # watched for norms of gradients


class WaitForParameters(pl.Callback):
    """The first of all callbacks: its hooks wait for all parameters, before the hooks of other callbacks.

    The two hooks of every training batch do not wait. Their overrides run inside `Sharded.reading` instead, where
    reading a parameter waits for that parameter (`watch_hooks`).
    """

    reads_parameters = False  # any callback may set this: its hooks are then not watched

    def __init__(self, wait_parameters: Callable[[], None]) -> None:
        self.wait_parameters = wait_parameters


def _waiting_hook(name: str) -> Callable[..., None]:
    def hook(self: WaitForParameters, *_: Any, **__: Any) -> None:
        self.wait_parameters()

    hook.__name__ = name
    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in (*_EACH_BATCH, *_ALONE):
        setattr(WaitForParameters, _name, _waiting_hook(_name))


def watch_hooks(
    trainer: pl.Trainer, reading: Callable[[], AbstractContextManager[None]], wait_parameters: Callable[[], None]
) -> Callable[[], None]:
    """Run overridden hooks between two training steps inside ``reading()``, and hooks that begin a validation after
    ``wait_parameters()``. Returns a function that undoes this."""

    def complete() -> AbstractContextManager[None]:
        wait_parameters()
        return nullcontext()

    undo = [
        _wrap(owner, name, complete if name in _BEFORE_VALIDATION else reading) for owner, name in _overridden(trainer)
    ]

    def undo_all() -> None:
        for undo_one in undo:
            undo_one()

    return undo_all


def _overridden(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    others = [one for one in trainer.callbacks if getattr(one, "reads_parameters", True)]  # type: ignore[attr-defined]
    for callback in others:
        for name in (*_EACH_BATCH, *_AFTER_BACKWARD):
            if getattr(type(callback), name) is not getattr(pl.Callback, name) or name in vars(callback):
                yield callback, name
    for name in (*_MODULE_HOOKS, *_AFTER_BACKWARD, *_BEFORE_VALIDATION):
        if is_overridden(name, trainer.lightning_module):
            yield trainer.lightning_module, name
    datamodule = getattr(trainer, "datamodule", None)
    for name in (*_TRANSFERS, "val_dataloader") if datamodule is not None else ():
        if is_overridden(name, datamodule):
            yield datamodule, name


def _wrap(owner: Any, name: str, reading: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    watched = _Watched(owner, name, reading)
    setattr(owner, name, watched)
    return watched.undo


class _Watched:
    """The hook ``name`` of ``owner``, run inside ``reading()``. Copying or pickling the owner restores the plain
    hook."""

    def __init__(self, owner: Any, name: str, reading: Callable[[], AbstractContextManager[None]]) -> None:
        functools.update_wrapper(self, getattr(owner, name))
        self._owner, self._name, self._reading = owner, name, reading
        self._of_the_instance = vars(owner).get(name)
        self._hook = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._reading():
            return self._hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_hook, (self._owner, self._name, self._of_the_instance)

    def undo(self) -> None:
        if self._of_the_instance is not None:
            setattr(self._owner, self._name, self._of_the_instance)
        else:
            delattr(self._owner, self._name)


def _plain_hook(owner: Any, name: str, of_the_instance: Any) -> Any:
    return of_the_instance if of_the_instance is not None else getattr(type(owner), name).__get__(owner)
