"""The interface of a training algorithm, which keeps the replicas of a model together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator

log = logging.getLogger(__name__)

Tell = Callable[[str], None]  # receives messages for the user


class Backwards(Protocol):
    """Which backward passes average their gradients over the ranks."""

    def plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        """Around code whose plain ``loss.backward()`` belongs to the training (``reduced``), or
        stays local.
        """

    @property
    def reduces_plain_backwards(self) -> bool:
        """Whether the current code is inside ``plain_backwards(reduced=True)``."""

    def finish(self) -> None:
        """Complete a plain backward whose end autograd did not announce. Else nothing happens."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backwards of gradient accumulation, except the last."""

    def discarding(self) -> AbstractContextManager[None]:
        """Around a backward whose gradients do not count."""


class LocalBackwards:
    """`Backwards` that average nothing."""

    reduces_plain_backwards = False

    def plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    discarding = no_sync

    def finish(self) -> None: ...


class Algorithm:
    """Keeps the replicas of a model, one on each rank, together. This class does nothing, as for a
    single process.

    Subclasses override the methods that they need. All ranks make the same calls in the same order;
    only `detach` may be called by one rank alone. A training loop calls::

        algorithm.attach(module, optimizers, communicator)
        hooks = StepHooks(algorithm)  # calls before_step and after_step
        for batch in batches:
            algorithm.begin_batch()
            with algorithm.forward():
                loss = module(batch)
            with algorithm.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        algorithm.wait_parameters()
        hooks.remove()
        algorithm.detach()

    The protocols in `lightning_ring.algorithms.optional` name what only some algorithms have. With
    a method ``metrics() -> dict[str, float]``, the monitor logs its numbers under ``ring/``.

    Attributes:
        backwards: Which backward passes average their gradients.
        sharded: Whether parameters and optimizer state are sharded over the ranks between two
            steps (`ShardsState`).
        steps_alone: Whether ranks step with gradients of their own, so that their parameters differ
            between two steps (`StepsAlone`). Each rank then needs data for every step, and a loss
            scaler would skip different ones.
        steps_together: Whether all ranks take the same number of steps. Else nothing between two
            steps may wait for other ranks, and an epoch may have more batches on one rank than on
            another.
        refuses_clipping: Why gradients cannot be clipped on a rank; ``""`` if they can.
    """

    backwards: Backwards = LocalBackwards()
    sharded: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    steps_together: bool = True
    refuses_clipping: str = ""

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Tell = log.warning,
        inform: Tell = log.info,
    ) -> None:
        """Begin a training. ``warn`` and ``inform`` receive messages for the user. Collective.

        Raises:
            ConfigurationError: The algorithm cannot train this module with these optimizers.
        """

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers in the middle of a training."""

    def detach(self, *, wait: bool = True) -> None:
        """End the training, and restore module and optimizers. Allowed after an `attach` that
        raised, and twice.

        ``wait=False``, after an exception, waits for no other rank.
        """

    # -- a batch

    def begin_batch(self, active_ranks: int | None = None) -> None:
        """Before the forward of a batch. ``active_ranks``: number of ranks that have data,
        `None` for all.
        """

    def forward(self, *, wait: bool = True) -> AbstractContextManager[None]:
        """Around code that computes a loss. With ``wait`` all parameters are complete when the
        block ends.
        """
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Around the outermost backward of the training."""
        return nullcontext()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Before any optimizer's step. ``has_closure``: the step computes gradients in a
        closure. Code that knows the closure calls this again, without it, at the closure's end.

        Raises:
            RingError: ``optimizer`` is about to step gradients that differ between ranks.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """After any optimizer's step."""

    # -- reading parameters and gradients

    def wait_parameters(self) -> None:
        """Return when every parameter has its new values on this rank: all parameters are
        complete.
        """

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients so that their norm over ``parameters`` is at most ``max_norm``;
        returns the norm before.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm itself (residuals, anchors, counters), on rank 0 for all ranks.
        Collective.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Continue from `state_dict`, the same on every rank. Returns a message if that is
        impossible, else ``""``.
        """
        return ""

    # -- requests to stop, progress

    def ask_to_stop(self, asked: bool = True) -> None:
        """Ask all ranks to stop, with the next exchange between them; ``asked=False`` takes that
        back.
        """

    def agreed_to_stop(self) -> bool:
        """Whether some rank had asked to stop by the last exchange; the same answer on every
        rank, once.
        """
        return False

    def progress(self) -> str:
        """Position within the training for stall reports, such as ``"backward 12"``. Called from
        another thread.
        """
        return ""

    def description(self) -> str:
        """How gradients or parameters travel, for one line in the log."""
        return ""
