"""Code that Lightning runs between an optimizer's step and the next training step, and that may read parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")
_ALONE = ("on_exception", "on_load_checkpoint")  # here ranks may be alone, or have nothing to wait for
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MODULE_HOOKS = (*_EACH_BATCH, *_TRANSFERS, "optimizer_step", "lr_scheduler_step")


class WholeParameters(pl.Callback):
    """The first of all callbacks: has all parameters whole before any other's hook runs.

    Not in the two hooks of every training batch: those that are overridden run inside `Sharding.reading` instead, where
    a read waits for what it reads (`watch_hooks`).
    """

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


def watch_hooks(trainer: pl.Trainer, reading: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Run every overridden hook between two training steps inside ``reading()``; returns what undoes it."""
    undo = [_wrap(owner, name, reading) for owner, name in _overridden(trainer)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _overridden(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in _EACH_BATCH:
            if getattr(type(callback), name) is not getattr(pl.Callback, name) or name in vars(callback):
                yield callback, name
    for name in _MODULE_HOOKS:
        if is_overridden(name, trainer.lightning_module):
            yield trainer.lightning_module, name
    datamodule = getattr(trainer, "datamodule", None)
    for name in _TRANSFERS if datamodule is not None else ():
        if is_overridden(name, datamodule):
            yield datamodule, name


def _wrap(owner: Any, name: str, reading: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    hook = getattr(owner, name)
    was_of_the_instance = name in vars(owner)

    @functools.wraps(hook)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with reading():
            return hook(*args, **kwargs)

    setattr(owner, name, watched)
    return (
        functools.partial(setattr, owner, name, hook)
        if was_of_the_instance
        else functools.partial(delattr, owner, name)
    )
