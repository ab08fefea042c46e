"""Losses, backwards and clipping: manual optimization, ranks without a loss, and refusals."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import CodeType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import ShardsState
from lightning_ring.errors import ConfigurationError


class NoSync:
    """The attribute ``no_sync`` of the module in training, as with DistributedDataParallel.

    A copied or pickled one does nothing.
    """

    def __init__(self, block_backward_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._block_backward_sync = block_backward_sync

    def __call__(self) -> AbstractContextManager[None]:
        """Around backwards that leave gradients local."""
        return self._block_backward_sync()

    def __reduce__(self) -> Any:
        return partial, (nullcontext,)


def calls_manual_backward(module: LightningModule) -> bool:
    """Whether code of the module's class names ``manual_backward``.

    If so, a plain ``loss.backward()`` has another purpose (an adversarial example, a saliency map)
    and stays local, as under DDP. If not, plain backwards are the training.
    """
    owners = set(type(module).__mro__) - set(LightningModule.__mro__)
    values = [value for owner in owners for value in vars(owner).values()]
    functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in values]
    return any(_names_it(getattr(function, "__code__", None)) for function in functions)


def _names_it(code: Any) -> bool:
    return isinstance(code, CodeType) and (
        "manual_backward" in code.co_names or any(map(_names_it, code.co_consts))
    )


log = logging.getLogger(__name__)


class ZeroLoss:
    """A loss without parameters, whose backward takes part in the reduction with zeros."""

    def __init__(self) -> None:
        self.in_use = False
        self._repeated_loss: Tensor | None = None

    def new(self, output: Any, device: torch.device, *, has_data: bool, rank: int) -> Tensor:
        """A zero loss for the current step, whose ``output`` is `None` or of a repeated batch."""
        self._repeated_loss = None
        if has_data:
            _warn_of_none(rank)
        else:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            self._repeated_loss = loss if isinstance(loss, Tensor) else None
        self.in_use = True
        return torch.zeros((), device=device, requires_grad=True)

    def repeat_backward(self, algorithm: Algorithm) -> None:
        """Run the backward of the repeated batch with zero gradients.

        Collectives inside backward (`all_gather` with gradients, SyncBatchNorm) need all ranks.
        """
        loss, self._repeated_loss = self._repeated_loss, None
        if loss is not None and loss.requires_grad:
            with algorithm.backwards.discarding():
                loss.backward(torch.zeros_like(loss))


@cache
def _warn_of_none(rank: int) -> None:
    log.warning(
        "lightning_ring: training_step returned None on rank %d: for that step its gradient "
        "counts as zero, and the average still divides by all ranks.",
        rank,
    )


def follow_clipping(algorithm: Algorithm, trainer: pl.Trainer) -> None:
    """Until `leave_clipping`, clip by a norm that covers the shards of all ranks.

    Raises:
        ConfigurationError: It cannot train with the Trainer's loss scaler or clipping.
    """
    plugin = trainer.precision_plugin
    refuse_scaler(plugin, algorithm)
    if why := algorithm.refuses_clipping:
        if trainer.gradient_clip_val:
            raise ConfigurationError(
                f"Trainer got gradient_clip_val={trainer.gradient_clip_val}, but {why}"
            )
        plugin.clip_gradients = partial(_refuse_to_clip, plugin.clip_gradients, algorithm)  # type: ignore[method-assign]
    plain = type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
    if plain and isinstance(algorithm, ShardsState):
        plugin.clip_grad_by_norm = partial(_clip_by_norm, plugin, algorithm)  # type: ignore[method-assign]


def leave_clipping(plugin: Precision) -> None:
    for name in ("clip_gradients", "clip_grad_by_norm"):
        vars(plugin).pop(name, None)


def _refuse_to_clip(
    clip: Any, algorithm: Algorithm, optimizer: Any, clip_val: float = 0.0, *how: Any, **named: Any
) -> None:
    if clip_val > 0:
        why = algorithm.refuses_clipping
        raise ConfigurationError(f"gradients were about to be clipped at {clip_val}, but {why}")
    clip(optimizer, clip_val, *how, **named)


def _clip_by_norm(plugin: Precision, algorithm: Algorithm, optimizer: Any, clip_val: float) -> None:
    algorithm.clip_grad_norm_(plugin.main_params(optimizer), clip_val)


def refuse_scaler(precision: Any, algorithm: Algorithm) -> None:
    """Check ``precision`` for an algorithm whose ranks step with gradients of their own.

    Raises:
        ConfigurationError: ``precision``, a plugin of Lightning or Fabric, has a loss scaler, which
            skips a step if a gradient is not finite.
    """
    if algorithm.steps_alone and getattr(precision, "scaler", None) is not None:
        raise ConfigurationError(
            f"algorithm {type(algorithm).__name__} got a precision with a loss scaler "
            f"({type(precision).__name__}, '16-mixed'): ranks would skip different steps. Use "
            "precision 'bf16-mixed', or strategy 'ring'."
        )
