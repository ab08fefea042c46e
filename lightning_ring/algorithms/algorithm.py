"""The interface of a training algorithm, which keeps the replicas of a model together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.holdings import Holdings, whole_state
from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.squared_norms import sum_of_squares

log = logging.getLogger(__name__)


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

    Attributes:
        sharded: Whether parameters and optimizer state are sharded over the ranks between two
            steps.
        steps_alone: Whether ranks step with gradients of their own, so that their parameters differ
            between two steps. Each rank then needs data for every step, and a loss scaler would
            skip different ones.
        steps_together: Whether all ranks take the same number of steps. Else nothing between two
            steps may wait for other ranks, and an epoch may have more batches on one rank than on
            another.
        mirrors_shards: Set before `attach`, where ranks may die: each rank holds what another one
            alone would have.
        mirror_order: Then, all ranks: each holds what the one before it has. `None`: by number.
    """

    sharded: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    steps_together: bool = True
    mirrors_shards: bool = False
    mirror_order: Sequence[int] | None = None

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Callable[[str], None] = log.warning,
        inform: Callable[[str], None] = log.info,
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

    def num_workers(self, world_size: int) -> int:
        """How many ranks train, of ``world_size``: the first ones. The others are given no batch
        of the training.
        """
        return world_size

    def refusal_of_deaths(self) -> str:
        """Why this algorithm cannot go on when a rank dies; ``""`` if it can.

        It can if each rank's parameters and optimizer state are all there is: `attach` with fewer
        ranks then goes on. Or if `move` brings together what the ranks before had.
        """
        return f"{type(self).__name__} keeps state of its ranks that the others do not have"

    def before_commit(self) -> None:
        """Where ranks may die: once gradients are final. The optimizer's step then needs no
        other rank. Collective.
        """

    def after_commit(self) -> None:
        """Where ranks may die: after the step, which is finished. Completes the parameters.
        Collective.
        """

    def move(self, comm: Communicator, *, has_state: bool) -> None:
        """Where ranks have died or come: before `detach` and `attach` with ``comm``, over the ranks
        of ``comm``.

        Collective. If a rank dies in it, or in `attach`, it is called again. A rank without state
        has just come.

        Raises:
            StateLostError: A part of the state died with its ranks.
        """

    def let_in(self, caught_up: Any, *, receives: bool, compares: bool) -> tuple[int, int] | None:
        """Where processes have come: behind `attach`, give those that ``receive`` their state.
        Collective.

        ``caught_up`` is what this process has got before (`holdings`); ``compares``: some process
        has got anything. Returns the bytes that were sent to them, and those of all parameters and
        optimizer state. `None` where the caller has to send it.
        """
        return None

    def memory_to_join(self, parameters: int, state: int, ranks: int) -> int:
        """Bytes that a process allocates in a join, with which there are ``ranks``, and in its
        first step behind it.

        It has caught up with ``parameters`` and optimizer ``state`` of so many bytes. Activations
        do not count.
        """
        return 0

    def holdings(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Holdings | None:
        """What this rank can send to processes that catch up, until the next step. `None`: not
        yet.
        """
        return whole_state(module, optimizers)

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

    def finish_backward(self) -> None:
        """Complete a plain backward whose end autograd did not announce (`plain_backwards`).
        Else nothing happens.
        """

    def plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        """Around code whose plain ``loss.backward()`` belongs to the training (``reduced``), or
        stays local.
        """
        return nullcontext()

    @property
    def reduces_plain_backwards(self) -> bool:
        """Whether the current code is inside ``plain_backwards(reduced=True)``."""
        return False

    def no_sync(self) -> AbstractContextManager[None]:
        """Around the backwards of gradient accumulation, except the last."""
        return nullcontext()

    def discarding(self) -> AbstractContextManager[None]:
        """Around a backward whose gradients do not count."""
        return nullcontext()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Before any optimizer's step. ``has_closure``: the step computes gradients in a
        closure.
        """

    def check_gradients(self, optimizer: Optimizer) -> None:
        """After the closure of a step.

        Raises:
            RingError: ``optimizer`` is about to step gradients that differ between ranks.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """After any optimizer's step."""

    # -- reading parameters and gradients

    def reading(self) -> AbstractContextManager[None]:
        """Around code between two steps that may read parameters, or take norms of gradients."""
        return nullcontext()

    def wait_parameters(self) -> None:
        """Return when every parameter has its new values on this rank: all parameters are
        complete.
        """

    def show_averages(self) -> None:
        """Before an evaluation, a checkpoint or the end: have parameters be what the training
        stands for. Collective.

        Until the next `begin_batch`, where ranks hold different parameters in a training.
        """

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients so that their norm over ``parameters`` is at most ``max_norm``;
        returns the norm before.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def refusal_of_clipping(self) -> str:
        """Why gradients cannot be clipped on a rank; ``""`` if they can."""
        return ""

    def gradient_squares(self, parameters: Sequence[Parameter]) -> Tensor:
        """This rank's part of the squared norm of gradients. 0-d, float64, summed over ranks by
        the caller.
        """
        return sum_of_squares(parameters, 1)

    # -- checkpoints

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        """The ordinary, full state dict of the optimizer; under a sharded algorithm on rank 0
        only.
        """
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load an ordinary, full state dict of the optimizer."""
        optimizer.load_state_dict(state)

    def states_shown(self) -> AbstractContextManager[None]:
        """Around code that moves the optimizers' state to another device."""
        return nullcontext()

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

    def metrics(self) -> dict[str, float]:
        """Numbers about the training for the loggers, by name; the monitor logs rank 0's under
        ``ring/``.
        """
        return {}

    def description(self) -> str:
        """How gradients or parameters travel, for one line in the log."""
        return ""
