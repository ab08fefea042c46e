"""Lightning under sharded parameters: hooks wait for all-gathers, norms of gradients cover all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded import Sharded

_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")
_ALONE = ("on_exception", "on_load_checkpoint")  # on one rank alone, or with nothing to wait for
_BEFORE_VALIDATION = ("val_dataloader", "on_validation_model_zero_grad", "on_validation_model_eval")
_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step")  # watched for norms of gradients


class ShardedHooks:
    """Changes a Trainer and its precision plugin for one fit with ``algorithm``; `remove` changes them back.

    Args:
        wait_parameters: Waits for all parameters. Called before hooks of callbacks, and before a validation.
    """

    def __init__(
        self, trainer: pl.Trainer, plugin: Precision, algorithm: Sharded, wait_parameters: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._plugin = plugin
        self._algorithm = algorithm
        self._wait_parameters = wait_parameters
        self._first_callback = _WaitForParameters(wait_parameters)
        self._watched: list[_Watched] = []
        trainer.callbacks.insert(0, self._first_callback)  # type: ignore[attr-defined]
        self._see_all_shards()
        if is_overridden("configure_gradient_clipping", trainer.lightning_module):
            rank_zero_warn(
                "lightning_ring: configure_gradient_clipping is overridden. Under ring_sharded a gradient is valid in "
                "this rank's shard only: clip with self.clip_gradients(...) or "
                "self.trainer.strategy.clip_grad_norm_(...), which see all ranks' shards; "
                "torch.nn.utils.clip_grad_norm_ does not."
            )

    def begin_training(self) -> None:
        """From now on a step returns before its parameters are complete."""
        self._algorithm.overlaps = True
        self._stop_watching()
        self._watched = _watch_hooks(self._trainer, self._algorithm.watching_norms, self._wait_parameters)

    def remove(self) -> None:
        self._stop_watching()
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
        if (scaler := getattr(self._plugin, "scaler", None)) is not None:
            vars(scaler).pop("_unscale_grads_", None)
        if self._first_callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            self._trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]

    def _stop_watching(self) -> None:
        for watched in self._watched:
            watched.undo()
        self._watched = []

    def _see_all_shards(self) -> None:
        """Norms, and the search for infinite gradients, cover the shards of all ranks."""
        plugin, algorithm = self._plugin, self._algorithm
        if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin, algorithm)  # type: ignore[method-assign]
        else:
            rank_zero_warn(
                f"lightning_ring: {type(plugin).__name__} clips gradients by norm in its own way. Under ring_sharded "
                "it sees this rank's shard only; use self.trainer.strategy.clip_grad_norm_(...) in it."
            )
        if (scaler := getattr(plugin, "scaler", None)) is not None:
            scaler._unscale_grads_ = algorithm.unscale_shards(scaler._unscale_grads_)


def _clip_by_norm(plugin: Precision, algorithm: Sharded, optimizer: Optimizer, clip_val: float) -> None:
    algorithm.clip_grad_norm_(plugin.main_params(optimizer), clip_val)


class _WaitForParameters(pl.Callback):
    """The first of all callbacks: its hooks wait for all parameters, before the hooks of other callbacks.

    The two hooks of every training batch do not wait: there, reading a parameter waits for that parameter.
    """

    reads_parameters = False  # any callback may set this: its hooks are then not watched for norms

    def __init__(self, wait_parameters: Callable[[], None]) -> None:
        self.wait_parameters = wait_parameters


def _waiting_hook(name: str) -> Callable[..., None]:
    def hook(self: _WaitForParameters, *_: Any, **__: Any) -> None:
        self.wait_parameters()

    hook.__name__ = name
    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in (*_EACH_BATCH, *_ALONE):
        setattr(_WaitForParameters, _name, _waiting_hook(_name))


def _watch_hooks(
    trainer: pl.Trainer, watching_norms: Callable[[], AbstractContextManager[None]], wait_parameters: Callable[[], None]
) -> list[_Watched]:
    """Run overridden hooks that may take norms of gradients inside ``watching_norms()``, and hooks that begin a
    validation after ``wait_parameters()``."""

    def complete() -> AbstractContextManager[None]:
        wait_parameters()
        return nullcontext()

    return [
        _Watched(owner, name, complete if name in _BEFORE_VALIDATION else watching_norms)
        for owner, name in _overridden(trainer)
    ]


def _overridden(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    others = [one for one in trainer.callbacks if getattr(one, "reads_parameters", True)]  # type: ignore[attr-defined]
    for callback in others:
        for name in _AFTER_BACKWARD:
            if getattr(type(callback), name) is not getattr(pl.Callback, name) or name in vars(callback):
                yield callback, name
    for name in ("optimizer_step", *_AFTER_BACKWARD, *_BEFORE_VALIDATION):
        if is_overridden(name, trainer.lightning_module):
            yield trainer.lightning_module, name
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and is_overridden("val_dataloader", datamodule):
        yield datamodule, "val_dataloader"


class _Watched:
    """The hook ``name`` of ``owner``, run inside ``context()``. Copying or pickling the owner restores the plain
    hook."""

    def __init__(self, owner: Any, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        functools.update_wrapper(self, getattr(owner, name))
        self._owner, self._name, self._context = owner, name, context
        self._of_the_instance = vars(owner).get(name)
        self._hook = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
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
