"""Local SGD: every rank steps by itself, and every so many steps the ranks' parameters are
averaged.

Sources: Stich, "Local SGD converges fast and communicates little" (2019), arXiv:1805.09767,
    algorithm 1; Lin, Stich,
Patel and Jaggi, "Don't use large mini-batches, use local SGD" (2020), arXiv:1808.07217 (post-local
SGD: averages of gradients first).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_ring.algorithms.algorithm import Algorithm, Backwards, Tell, log
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.hooks import steps_module
from lightning_ring.comm.communicator import Communicator, as_integers
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.replicate import average_tensors
from lightning_ring.errors import ConfigurationError, check_arguments
from lightning_ring.gradients.compression import Compressor


class LocalSGD(Algorithm):
    """Rank r steps its parameters w_r with its own gradients; after each round of ``every`` steps
    w_r ← mean of all w.

    ``strategy="ring_local"`` is ``LocalSGD(every=8)``. During ``warmup_steps`` steps gradients are
    averaged instead, as ``strategy="ring"`` does it. Within a round the ranks' parameters differ.
    `show_averages` puts their average in place for evaluations and checkpoints, without an
    influence on the training: `begin_batch` brings each rank's own values back.

    Args:
        every: Steps of the optimizer between two averages of the parameters. The optimizer's state
            stays with its rank.
        warmup_steps: Steps at the begin whose gradients are averaged. Post-local SGD takes those
            before the learning rate first drops.
        bucket_cap_mb, compression: Of gradients, as of `Averaging`. Only those of the warm-up are
            compressed.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    steps_alone: ClassVar[bool] = True
    _exchange = "parameters are averaged"  # at the end of a round

    def __init__(
        self,
        every: int = 8,
        *,
        warmup_steps: int = 0,
        bucket_cap_mb: float | None = None,
        compression: str | Compressor | None = None,
    ) -> None:
        name = type(self).__name__
        check_arguments(
            name,
            type(every) is int and every >= 1 and type(warmup_steps) is int and warmup_steps >= 0,
            "1 or more steps between two averages, and 0 or more steps before the first round",
            every=every,
            warmup_steps=warmup_steps,
        )
        if compression is not None and not warmup_steps:
            raise ConfigurationError(
                f"{name} got compression={compression!r} with warmup_steps=0: it sends parameters, "
                "whole, and gradients only during a warm-up. Leave compression out, or use "
                "strategy 'ring'."
            )
        self.every = every
        self.warmup_steps = warmup_steps
        self.num_steps = 0
        self._settings = {"bucket_cap_mb": bucket_cap_mb, "compression": compression}
        self._gradients = Algorithm()  # during the warm-up `Averaging`
        # this rank's parameters, while the averages are in their place
        self._own: dict[Parameter, Tensor] = {}
        self._shown: list[Tensor] = []  # then, the averages
        self._told_of_changes = False
        # stepped since the ranks last agreed on them; they may be frozen by now
        self._apart: dict[Parameter, None] = {}
        self._asked_to_stop = self._agreed_to_stop = False
        self._optimizers: Sequence[Optimizer] = ()

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Tell = log.warning,
        inform: Tell = log.info,
    ) -> None:
        self._module, self._comm, self._inform = module, comm, inform
        self.set_optimizers(optimizers)
        if self.num_steps < self.warmup_steps:
            self._gradients = Averaging(**self._settings)  # type: ignore[arg-type]
            self._gradients.ask_to_stop(self._asked_to_stop)
            self._gradients.attach(module, optimizers, comm, warn, inform)
        self._begin_first_round()

    def _end_warm_up(self, *, wait: bool = True) -> None:
        self._gradients.detach(wait=wait)
        self._gradients = Algorithm()

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} got {len(optimizers)} optimizers, and a round counts the "
                "steps of one. Use one optimizer for all parameters, or strategy 'ring'."
            )
        self._optimizers = optimizers
        self._gradients.set_optimizers(optimizers)

    def detach(self, *, wait: bool = True) -> None:
        self._end_warm_up(wait=wait)
        # what is in place stays
        self._own, self._shown, self._apart, self._optimizers = {}, [], {}, ()

    # -- a batch

    @property
    def backwards(self) -> Backwards:  # type: ignore[override]
        return self._gradients.backwards

    def begin_batch(self, active_ranks: int | None = None) -> None:
        self._hide_averages()
        self._gradients.begin_batch(active_ranks)

    def forward(self, *, wait: bool = True) -> AbstractContextManager[None]:
        return self._gradients.forward(wait=wait)

    def backward(self) -> AbstractContextManager[None]:
        return self._gradients.backward()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._hide_averages()
        self._gradients.before_step(optimizer, has_closure=has_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        if not steps_module(optimizer, self._module):
            return
        self._gradients.after_step(optimizer)
        self.num_steps += 1
        if self.num_steps > self.warmup_steps:
            self._note_stepped()
            if self.steps_of_round == 0:
                self._end_round()
        elif self.num_steps == self.warmup_steps:
            self._agreed_to_stop |= self._gradients.agreed_to_stop()
            self._end_warm_up()
            self._begin_first_round()
            self._inform(f"{self.num_steps} steps of warm-up are over: {self._rounds()}")

    # -- rounds

    @property
    def steps_of_round(self) -> int:
        """Steps since the ranks last held the same parameters."""
        return max(0, self.num_steps - self.warmup_steps) % self.every

    def show_averages(self) -> None:
        comm = self._comm
        if self._own or self.steps_of_round == 0 or comm.world_size == 1:
            return
        self._show(self._parameters(), f"parameters after {self.num_steps} steps")

    def _show(self, params: Sequence[Parameter], name: str) -> None:
        self._own = {param: param.detach().clone() for param in params}
        average_tensors(params, unrecorded(self._comm), name)
        self._shown = [param.detach().clone() for param in params]

    @torch.no_grad()
    def _hide_averages(self) -> None:
        """Restore this rank's parameters, but for those that code has changed while the averages
        were in place.
        """
        if not self._own:
            return
        num_changed = 0
        for (param, own), shown in zip(self._own.items(), self._shown, strict=True):
            if torch.equal(as_integers(param.detach()), as_integers(shown)):
                param.copy_(own)
            else:
                num_changed += 1
        if num_changed and not self._told_of_changes:
            self._told_of_changes = True
            self._inform(
                f"{num_changed} parameters were changed while the average of the ranks' was in "
                "their place: training goes on from the changed values"
            )
        self._own, self._shown = {}, []

    def _end_round(self) -> None:
        stop = torch.tensor([float(self._asked_to_stop)])
        name = f"step {self.num_steps}: requests to stop"
        average_tensors([stop], unrecorded(self._comm), name)
        self._agreed_to_stop |= bool(stop > 0)
        self._average_parameters()

    def _begin_first_round(self) -> None:
        """The parameters are those of the first round's begin, the same on all ranks."""

    def _average_parameters(self) -> None:
        """Replace the parameters at the end of a round by those of the next round's begin."""
        average_tensors(self._parameters(), self._comm, f"step {self.num_steps}: parameters")
        self._apart.clear()

    def _parameters(self) -> list[Parameter]:
        """Those on which the ranks may differ, and those that are trained."""
        return [
            param
            for param in self._module.parameters()
            if param.requires_grad or param in self._apart
        ]

    def _note_stepped(self) -> None:
        for param in self._module.parameters():
            if param.requires_grad or param.grad is not None:
                self._apart[param] = None

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The position in the round, and every rank's own parameters and optimizer state."""
        ranks = []
        # the same answer on every rank
        if self.num_steps > self.warmup_steps or not self.steps_together:
            names = {param: name for name, param in self._module.named_parameters()}
            params = self._parameters() if self.steps_of_round else ()
            own = {names[param]: self._own.get(param, param) for param in params}
            optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
            ranks = self._collect({"parameters": own, "optimizers": optimizers})
        return {
            "num_steps": self.num_steps,
            "schedule": self._schedule,
            "ranks": ranks,
            "gradients": self._gradients.state_dict(),
        }

    def _collect(self, state: Any) -> list[Any]:
        """Every rank's ``state``, by rank, on rank 0; elsewhere empty. Collective.

        One rank's at a time: the others hold no more than one besides their own.
        """
        comm, states = unrecorded(self._comm), []

        def copied(value: Any) -> Any:
            return comm.read(value.detach()).clone() if isinstance(value, Tensor) else value

        mine = tree_map(copied, state)
        for rank in range(comm.world_size):
            each = comm.broadcast_object(mine, src=rank, name="state of a rank")
            if comm.rank == 0:
                states.append(each)
        return states

    @property
    def _schedule(self) -> dict[str, int]:
        """The settings that say where rounds end."""
        return {"every": self.every, "warmup_steps": self.warmup_steps}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        comm = self._comm
        if "num_steps" not in state:
            return (
                f"the checkpoint holds no state of {type(self).__name__}: its warm-up and its "
                "first round begin here."
            )
        self.num_steps = state["num_steps"]
        if self.num_steps >= self.warmup_steps:
            self._end_warm_up()
        of_gradients = state["gradients"]
        problem = self._gradients.load_state_dict(of_gradients) if of_gradients else ""
        self._own, self._shown = {}, []
        ranks, schedule = state["ranks"], state["schedule"]
        if not ranks:
            return problem
        if (schedule, len(ranks)) != (self._schedule, comm.world_size):
            begun = self.num_steps
            self.num_steps -= self.steps_of_round
            return (
                f"the checkpoint was written after {begun} steps of {len(ranks)} ranks with "
                f"{schedule}, and this job has {comm.world_size} ranks and {self._schedule}: every "
                "rank goes on from the average of their parameters, with rank 0's optimizer "
                "state, in a new round."
            )
        saved = ranks[comm.rank]["parameters"]
        params = dict(self._module.named_parameters())
        self._apart = {param: None for name, param in params.items() if name in saved}
        with torch.no_grad():
            for name, value in saved.items():
                params[name].copy_(value)
        for optimizer, own in zip(self._optimizers, ranks[comm.rank]["optimizers"], strict=False):
            optimizer.load_state_dict(own)
        return problem

    # -- requests to stop, progress

    def ask_to_stop(self, asked: bool = True) -> None:
        self._asked_to_stop = asked
        if self.num_steps < self.warmup_steps:
            self._gradients.ask_to_stop(asked)

    def agreed_to_stop(self) -> bool:
        agreed = self._agreed_to_stop or self._gradients.agreed_to_stop()
        self._agreed_to_stop = False
        return agreed

    def progress(self) -> str:
        return self._gradients.progress() or f"step {self.num_steps}"

    def description(self) -> str:
        if self.num_steps < self.warmup_steps:
            now = self._gradients.description()
            return f"{now}; after {self.warmup_steps} steps none: {self._rounds()}"
        return f": none, {self._rounds()}"

    def _rounds(self) -> str:
        return (
            f"each rank steps by itself, and {self._exchange} every {self.every} steps. "
            "Evaluations, checkpoints and the end of the training see the average of the ranks' "
            "parameters"
        )
