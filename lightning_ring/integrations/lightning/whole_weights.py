"""Whole weights in Lightning's hooks: complete, or averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ring.algorithms import optional
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import average_tensors

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


class OwnCallback(pl.Callback):
    """The strategy's own callback, from `setup` until the loop ends: its ``hooks`` call ``act``."""

    def __init__(self, act: Callable[[], None], hooks: Iterable[str]) -> None:
        for hook in hooks:
            setattr(self, hook, lambda *_, **__: act())


def leave_trainer(trainer: pl.Trainer) -> None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [one for one in callbacks if not isinstance(one, OwnCallback)]
    vars(trainer.fit_loop.epoch_loop).pop("_should_check_val_fx", None)


def complete_parameters_in_hooks(trainer: pl.Trainer, wait_parameters: Callable[[], None]) -> None:
    """Until `leave_trainer`, wait for all parameters before hooks and validations.

    The hooks of training batches do not wait. If one may read parameters, each step waits.
    """
    hooks = {name for name in dir(pl.Callback) if name.startswith("on_")} - {*_EACH_BATCH, *_ALONE}
    trainer.callbacks.insert(0, OwnCallback(wait_parameters, hooks))  # type: ignore[attr-defined]
    # the module's hooks before a validation run first
    loop = trainer.fit_loop.epoch_loop
    is_due = loop._should_check_val_fx

    def wait_if_due(data_fetcher: Any) -> bool:
        due = is_due(data_fetcher)
        if due:
            wait_parameters()
        return due

    loop._should_check_val_fx = wait_if_due  # type: ignore[method-assign]


def steps_may_overlap(trainer: pl.Trainer) -> bool:
    """Whether a step may return before its parameters are complete. Not with manual optimization, a
    hook between steps that is neither Lightning's nor ours, or `WeightAveraging`."""
    module = trainer.lightning_module
    hooks: list[tuple[Any, str]] = [(module, name) for name in _BETWEEN_STEPS]
    hooks += [(callback, name) for callback in trainer.callbacks for name in _EACH_BATCH]  # type: ignore[attr-defined]
    for owner, name in hooks:
        package = getattr(getattr(owner, name), "__module__", "")
        known = package.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_ring")
        if not known or package.endswith("weight_averaging"):
            rank_zero_info(
                f"lightning_ring: {type(owner).__name__}.{name} may read parameters. Each step "
                "waits for all of them, instead of having them arrive while the next forward runs."
            )
            return False
    return module.automatic_optimization


def average_before_reading(trainer: pl.Trainer, show_averages: Callable[[], None]) -> None:
    """Until `leave_trainer`, average before validations and at the end of epochs and of the fit.

    Averages stay until the next training batch.
    """
    hooks = ("on_validation_start", "on_train_epoch_end", "on_train_end")
    trainer.callbacks.insert(0, OwnCallback(show_averages, hooks))  # type: ignore[attr-defined]


@torch.no_grad()
def show_averages(
    algorithm: Algorithm, trainer: pl.Trainer, comm: Communicator, device: torch.device
) -> None:
    """Replace parameters by the ranks' average, if ranks step alone. Collective.

    Each rank's `WeightAveraging` follows its own steps: average it too, which is exact because
    averages over steps are linear.
    """
    optional.show_averages(algorithm)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            params = [param.detach() for param in callback._average_model.module.parameters()]
            # a GPU's communicator moves nothing on the host
            moved = [param.to(device) for param in params]
            average_tensors(moved, comm, "averages over steps")
            torch._foreach_copy_(params, moved)
