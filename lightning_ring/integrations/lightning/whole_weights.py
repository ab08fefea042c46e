"""Whole weights in Lightning's hooks: all parameters have arrived, or are the average of the ranks'
own ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_ring.algorithms import optional
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import ShardsState
from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import RingError

_EACH_BATCH = ("on_train_batch_start", "on_train_batch_end")
_BETWEEN_STEPS = (  # of a module, after a step and before the next forward
    *_EACH_BATCH,
    "optimizer_step",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_ALONE = ("on_exception", "on_load_checkpoint")  # on one rank alone, or with nothing to wait for
_BEFORE_VALIDATION = ("val_dataloader", "on_validation_model_zero_grad", "on_validation_model_eval")


class ShardedHooks:
    """Changes a Trainer and its precision plugin for one fit with ``algorithm``; `remove` changes
    them back.

    Args:
        wait_parameters: Waits for all parameters. Called before hooks of callbacks, and before a
            validation.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        plugin: Precision,
        algorithm: Algorithm,
        wait_parameters: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._plugin = plugin
        self._algorithm = algorithm
        self._wait_parameters = wait_parameters
        self._first_callback = _WaitForParameters(wait_parameters)
        self._waiting: list[_Waiting] = []
        trainer.callbacks.insert(0, self._first_callback)  # type: ignore[attr-defined]
        self._clip_all_shards()

    def begin_training(self) -> None:
        """From now on a step returns before its parameters are complete: between two steps nothing
        reads them, unless the module steps optimizers itself, or a user's hook runs there.
        """
        assert isinstance(self._algorithm, ShardsState)
        self._algorithm.overlaps = self._trainer.lightning_module.automatic_optimization
        for owner, hook in _between_steps(self._trainer):
            self._algorithm.overlaps = False
            rank_zero_info(
                f"lightning_ring: {type(owner).__name__}.{hook} may read parameters. Each step "
                "waits for all of them, instead of having them arrive while the next forward runs."
            )
            break
        self._stop_waiting()
        self._waiting = [
            _Waiting(owner, name, self._wait_parameters)
            for owner, name in _before_validation(self._trainer)
        ]

    def remove(self) -> None:
        self._stop_waiting()
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
        if self._first_callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            self._trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]

    def _stop_waiting(self) -> None:
        for waiting in self._waiting:
            waiting.undo()
        self._waiting = []

    def _clip_all_shards(self) -> None:
        """A norm that the plugin clips by covers the shards of all ranks."""
        plugin, algorithm = self._plugin, self._algorithm
        if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin, algorithm)  # type: ignore[method-assign]


def _clip_by_norm(
    plugin: Precision, algorithm: Algorithm, optimizer: Optimizer, clip_val: float
) -> None:
    algorithm.clip_grad_norm_(plugin.main_params(optimizer), clip_val)


class _WaitForParameters(pl.Callback):
    """The first of all callbacks: its hooks wait for all parameters, before the hooks of other
    callbacks.

    The two hooks of every training batch do not wait. If one may read parameters, each step waits.
    """

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


def _between_steps(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """Callbacks and modules with hooks between two steps that may read parameters: those that are
    neither Lightning's nor ours, and of Lightning's `WeightAveraging`.
    """
    hooks = [(callback, name) for callback in trainer.callbacks for name in _EACH_BATCH]  # type: ignore[attr-defined]
    for owner, name in (*hooks, *((trainer.lightning_module, name) for name in _BETWEEN_STEPS)):
        package = getattr(getattr(owner, name), "__module__", "")
        known = package.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_ring")
        if not known or package.endswith("weight_averaging"):
            yield owner, name


def _before_validation(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """Overridden hooks that begin a validation."""
    for name in _BEFORE_VALIDATION:
        if is_overridden(name, trainer.lightning_module):
            yield trainer.lightning_module, name
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and is_overridden("val_dataloader", datamodule):
        yield datamodule, "val_dataloader"


class _Waiting:
    """The hook ``name`` of ``owner``, run after ``wait_parameters()``. A copied or pickled owner
    has the plain hook.
    """

    def __init__(self, owner: Any, name: str, wait_parameters: Callable[[], None]) -> None:
        functools.update_wrapper(self, getattr(owner, name))
        self._owner, self._name, self._wait_parameters = owner, name, wait_parameters
        self._of_the_instance = vars(owner).get(name)
        self._hook = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._wait_parameters()
        return self._hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _plain_hook, (self._owner, self._name, self._of_the_instance)

    def undo(self) -> None:
        if self._of_the_instance is not None:
            setattr(self._owner, self._name, self._of_the_instance)
        else:
            delattr(self._owner, self._name)


def _plain_hook(owner: Any, name: str, of_the_instance: Any) -> Any:
    return (
        of_the_instance
        if of_the_instance is not None
        else getattr(type(owner), name).__get__(owner)
    )


def wait_parameters(algorithm: Algorithm, *, alone: bool) -> None:
    """Return when all parameters have arrived; ``alone``: after an exception, when they may not."""
    try:
        algorithm.wait_parameters()
    except RingError as error:
        if not alone or not isinstance(algorithm, optional.ShardsState):
            raise
        algorithm.show()
        rank_zero_warn(
            "lightning_ring: after the exception some parameters did not arrive from the ranks "
            f"that stepped them ({type(error).__name__}). On this rank the weights, and a "
            "checkpoint of them, mix those before and after the last step: go on from an earlier "
            "checkpoint."
        )


def show_averages(algorithm: Algorithm, *, alone: bool) -> None:
    """Put the ranks' average into the place of the parameters, where ranks step alone.
    Collective, unless ``alone``.
    """
    if not algorithm.steps_alone:
        return
    if alone:
        rank_zero_warn(
            "lightning_ring: after the exception the weights, and a checkpoint of them, are this "
            "rank's, and not the average of the ranks'. Go on from an earlier checkpoint."
        )
        return
    optional.show_averages(algorithm)


class ShowAverages(pl.Callback):
    """The first of all callbacks: has averages in place before validations, and at the end of
    epochs and of the fit.

    They stay until the next training batch. Hooks of training batches see this rank's own
    parameters.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self.show = show

    def follow(self, trainer: pl.Trainer) -> None:
        self.leave(trainer)
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def leave(self, trainer: pl.Trainer) -> None:
        if self in (callbacks := trainer.callbacks):  # type: ignore[attr-defined]
            callbacks.remove(self)

    def on_validation_start(self, *_: Any) -> None:
        self.show()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.show()

    def on_train_end(self, *_: Any) -> None:
        self.show()


@torch.no_grad()
def average_weight_averages(trainer: pl.Trainer, comm: Communicator, device: torch.device) -> None:
    """Each rank's `WeightAveraging` follows that rank's own steps: have it be the average over the
    ranks. Collective.

    The averages over steps are linear, so that it is that of the ranks' average, and so it remains.
    """
    from lightning_ring.algorithms.local.averages import average_  # only some algorithms need it

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            params = [param.detach() for param in callback._average_model.module.parameters()]
            # a GPU's communicator moves nothing on the host
            moved = [param.to(device) for param in params]
            average_(moved, comm, "averages over steps")
            torch._foreach_copy_(params, moved)
