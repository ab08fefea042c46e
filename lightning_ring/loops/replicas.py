"""`Replicas`: the replicas of one module, which an algorithm keeps together in a loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.hooks import StepHooks, UncopiedHook, steps_module
from lightning_ring.algorithms.optional import (
    ShardsState,
    load_optimizer_state_dict,
    optimizer_state_dict,
    show_averages,
)
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import Listener, RecordedCommunicator
from lightning_ring.comm.replicate import (
    broadcast_buffers,
    broadcast_module,
    broadcast_optimizer_state,
    check_same_model,
)
from lightning_ring.loops.timeline import LoopTimeline

log = logging.getLogger("lightning_ring")


class Replicas:
    """The replicas of ``module``, on all ranks of ``comm``, from here to `remove`. Building one is
    collective.

    They begin with rank 0's parameters, buffers and optimizer state. From then on every backward
    that reaches the module's parameters averages gradients over the ranks, except inside `no_sync`.
    Hooks on the module tell when a forward begins and ends; a copy of the module has none. Without
    ``comm``, in a single process, nothing is registered, unless a timeline is recorded.

    Args:
        optimizers: Optimizers of the module's parameters. Optimizers built later are found when
            they step; if one has parameters that no other optimizer had, call `add_optimizers`
            before the forward.
        called: The module whose calls are the forwards, if it wraps ``module``. It is not kept.
        broadcast_buffers: After each step rank 0's buffers (BatchNorm statistics) replace those of
            the other ranks.
        label: Begins the names of collectives, where there are several modules: ``"module 1: "``.
        listeners: Called with a `CollectiveRecord` of each collective of the training.
        timeline: Gets the times of forwards and steps.
        warn: Receives messages for the user.

    Raises:
        ModelMismatchError: The ranks hold different modules or optimizers.
        ConfigurationError: The algorithm cannot train this module with these optimizers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        comm: Communicator | None,
        *,
        called: nn.Module | None = None,
        broadcast_buffers: bool = True,
        label: str = "",
        listeners: list[Listener] | None = None,
        timeline: LoopTimeline | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.module = module
        self.algorithm = algorithm if comm is not None else Algorithm()
        self.comm = comm
        self.timeline = timeline
        self.listeners = listeners if listeners is not None else []
        self._optimizers = list(optimizers)
        self._broadcasts_buffers = broadcast_buffers
        self._training = ExitStack()
        self._forwards: list[ExitStack] = []
        self._hooks: list[Any] = []
        self._step_began: Any = None
        if comm is not None:
            check_same_model(module, comm)
            broadcast_module(module, comm)
            for optimizer in self._optimizers:
                broadcast_optimizer_state(optimizer, comm)
            recorded = RecordedCommunicator(comm, self.listeners, label)
            self.algorithm.attach(module, self._optimizers, recorded, warn, log.info)
        elif timeline is None:
            return
        try:
            entered = called if called is not None else module
            self._hooks = [
                entered.register_forward_pre_hook(UncopiedHook(self._before_forward), prepend=True),
                entered.register_forward_hook(UncopiedHook(self._after_forward), always_call=True),
            ]
            self._hooks.append(StepHooks(self))
            self._training.enter_context(self.algorithm.backwards.plain_backwards(reduced=True))
        except BaseException:
            self.remove(wait=False)
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of these backwards local. Leave it for the last of an accumulation."""
        return self.algorithm.backwards.no_sync()

    def wait_parameters(self) -> None:
        """Return when all parameters are complete, for reads that are not detected (threads,
        compiled code)."""
        self.algorithm.wait_parameters()

    def show_averages(self) -> None:
        """Before an evaluation or a checkpoint: average parameters of ranks that train alone.
        Collective.

        Lasts until the next forward of the training.
        """
        show_averages(self.algorithm)
        if self.algorithm.steps_alone and self._broadcasts_buffers and self.comm is not None:
            broadcast_buffers(self.module, self.comm)

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients so that their norm over ``parameters`` is at most ``max_norm``; returns
        the norm before.

        As `torch.nn.utils.clip_grad_norm_`, for sharded gradients too. All ranks call it, with the
        same parameters.
        """
        self.algorithm.backwards.finish()
        return self.algorithm.clip_grad_norm_(parameters, max_norm, norm_type)

    def add_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Have ``optimizers`` that were built later step the module's parameters. Collective."""
        new = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        if self.comm is None or not new:
            return
        for optimizer in new:
            broadcast_optimizer_state(optimizer, self.comm)
        self._optimizers += new
        self.algorithm.set_optimizers(self._optimizers)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state dict. Collective; under a sharded algorithm empty except on rank 0."""
        return optimizer_state_dict(
            self.algorithm, optimizer, is_rank_zero=self.comm is None or self.comm.rank == 0
        )

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state dict; rank 0's counts. Collective."""
        if self.comm is not None and self.algorithm.sharded:
            state = self.comm.broadcast_object(state, name="load_optimizer_state_dict")
        load_optimizer_state_dict(self.algorithm, optimizer, state)
        if self.comm is not None and not self.algorithm.sharded:
            broadcast_optimizer_state(optimizer, self.comm)

    def remove(self, *, wait: bool = True) -> None:
        """End the training: remove all hooks. ``wait=False`` waits for no other rank."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if wait:
            self.show_averages()
            self._training.close()
        self._training = ExitStack()
        self.algorithm.detach(wait=wait)

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, _: Any) -> None:
        forward = ExitStack()
        self._forwards.append(forward)
        if (timeline := self.timeline) is not None:
            began = timeline.now()
            forward.callback(lambda: timeline.forward(began, timeline.now()))
        if not torch.is_grad_enabled() or torch._C._current_autograd_node() is not None:
            self.algorithm.wait_parameters()
            return  # an evaluation, or a checkpoint that computes its forward again
        self.algorithm.begin_batch()
        if isinstance(self.algorithm, ShardsState):
            self.algorithm.overlaps = True
        forward.enter_context(self.algorithm.forward())

    @torch.compiler.disable
    def _after_forward(self, *_: Any) -> None:
        self._forwards.pop().close()

    def steps(self, optimizer: Optimizer) -> bool:
        return steps_module(optimizer, self.module)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self.timeline is not None:
            self._step_began = self.timeline.now()
        self.algorithm.before_step(optimizer, has_closure=has_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        self.algorithm.after_step(optimizer)
        if not self.steps(optimizer):
            return
        if self._broadcasts_buffers and self.comm is not None and not self.algorithm.steps_alone:
            broadcast_buffers(self.module, self.comm)
        if self.timeline is not None:
            self.timeline.optimizer_step(self._step_began, self.timeline.now())
