"""Code that Lightning runs between an optimizer's step and the next training step, and that may read parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")
_ALONE = ("on_exception", "on_load_checkpoint")  # here ranks may be alone, or have nothing to wait for
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MODULE_HOOKS = (*_EACH_BATCH, *_TRANSFERS, "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
_BEFORE_VALIDATION = ("val_dataloader", "on_validation_model_zero_grad", "on_validation_model_eval")
_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step")  # watched for norms of gradients


class WholeParameters(pl.Callback):
    """The first of all callbacks: has all parameters whole before any other's hook runs.

    Not in the two hooks of every training batch: those that are overridden run inside `Sharding.reading` instead, where
    a read waits for what it reads (`watch_hooks`).
    """

    reads_parameters = False  # as any callback may say of itself: its hooks are not watched

    def __init__(self, make_whole: Callable[[], None]) -> None:
        self.make_whole = make_whole


def _waiting_hook(name: str) -> Callable[..., None]:
    def hook(self: WholeParameters, *_: Any, **__: Any) -> None:
        self.make_whole()

    hook.__name__ = name
    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in (*_EACH_BATCH, *_ALONE):
        setattr(WholeParameters, _name, _waiting_hook(_name))


def watch_hooks(
    trainer: pl.Trainer, reading: Callable[[], AbstractContextManager[None]], make_whole: Callable[[], None]
) -> Callable[[], None]:
    """Run every overridden hook between two training steps inside ``reading()``, and those that begin a validation
    after ``make_whole()``; returns what undoes it."""

    def whole() -> AbstractContextManager[None]:
        make_whole()
        return nullcontext()

    undo = [
        _wrap(owner, name, whole if name in _BEFORE_VALIDATION else reading) for owner, name in _overridden(trainer)
    ]

    def undo_all() -> None:
        for one in undo:
            one()

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
    """The hook ``name`` of ``owner``, run inside ``reading()``. In a copy of the owner, or a pickled one, it is the
    plain hook again."""

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
