"""A plain PyTorch loop whose ranks may die and come, at any point."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import refusal_of_deaths
from lightning_ring.algorithms.step_hooks import StepHooks
from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.handover import Stateful, hand_over
from lightning_ring.elastic.recovery import BLAME_SECONDS, Recovery
from lightning_ring.elastic.step_under_way import StepUnderWay
from lightning_ring.elastic.undo import remember
from lightning_ring.errors import ConfigurationError
from lightning_ring.membership.member import Member
from lightning_ring.membership.view import View


class ElasticLoop:
    """Trains ``module`` step by step over the ranks that are there. ``algorithm`` is not attached
    yet.

    A loop of all ranks, newcomers included::

        loop.start()
        while loop.step < num_steps:
            loop.take_step(lambda: compute_gradients(loop.position, loop.rank), samples=batch_size)
        loop.finish()

    The function computes the gradients of this rank, with backward inside ``algorithm.backward()``;
    where a rank dies it is called again, with other ranks, from the same position. Rank 0's initial
    values count, and newcomers get ``module``, optimizer state and ``parts`` from a rank that has
    them.

    Attributes:
        position: Number of samples that all ranks together have trained on.

    Raises:
        ConfigurationError: The algorithm cannot go on without one of its ranks.
    """

    def __init__(
        self,
        member: Member,
        generations: Generations,
        algorithm: Algorithm,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        sharded = "it shards the optimizer's state" if algorithm.sharded else ""
        if refusal := refusal_of_deaths(algorithm) or sharded:
            raise ConfigurationError(
                f"An elastic training cannot use this algorithm: {refusal}. Use Averaging "
                "(strategy='ring'), or a job that ends when a rank dies."
            )
        self.position = 0
        self._samples = 0  # of all ranks, in the step under way
        self._under_way = StepUnderWay()
        self._member = member
        self._generations = generations
        self._algorithm = algorithm
        self._module = module
        self._optimizers = list(optimizers)
        self._parts: dict[str, Stateful] = {"position": _Position(self), **(parts or {})}
        self._recovery = Recovery(member, generations, self)
        self._hooks: StepHooks | None = None

    @property
    def step(self) -> int:
        """Number of optimizer steps that are finished."""
        return self._recovery.step or 0

    @property
    def rank(self) -> int:
        return self._generations.communicator.rank

    @property
    def world_size(self) -> int:
        return self._generations.communicator.world_size

    def start(self) -> None:
        """Take part, from the next step of the others on. Collective."""
        self._hooks = StepHooks(self._algorithm)
        self._recovery.start()

    def take_step(self, compute_gradients: Callable[[], object], samples: int) -> None:
        """Compute gradients, on ``samples`` samples of this rank, average them and step the
        optimizers, once.
        """
        after = self.step + 1
        while self.step < after:
            self._under_way.begin(remember(self._module))
            try:
                self._samples = samples * self.world_size
                self._algorithm.begin_batch()
                compute_gradients()
                self._recovery.complete = True
                self._recovery.agree()
            except Exception as error:
                self._recovery.after(error)
                continue
            self._recovery.commit()
            if self._recovery.newcomers_wait:
                self._recovery.pause()

    def finish(self) -> None:
        """End the training, once every rank is here. Whoever dies meanwhile is no longer needed."""
        while True:
            try:
                self._generations.communicator.barrier()
            except Exception as error:
                if not self._training_is_over():
                    self._recovery.after(error)
                    continue
            break
        self._member.finish()
        self._algorithm.detach(wait=False)
        if self._hooks is not None:
            self._hooks.remove()
        self._generations.close()

    def _training_is_over(self) -> bool:
        """Whether another rank has finished. It may have hung up before the steward's word of
        that comes here.
        """
        until = time.monotonic() + BLAME_SECONDS
        while (
            not self._member.training_is_over
            and not self._member.is_over(0.01)
            and time.monotonic() < until
        ):
            pass
        return self._member.training_is_over

    # -- called by the recovery

    def welcomes_newcomers(self) -> bool:
        return True

    def is_between(self, first_attempt: bool) -> bool:
        return True  # also within a step: all of it is done again

    def commit(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.position += self._samples
        self._under_way.finish()

    def take_back(self) -> None:
        self._under_way.take_back()

    def enter(self, view: View, comm: Communicator) -> bool:
        self._algorithm.detach(wait=False)
        for param in self._module.parameters():
            param.grad = None  # part of a step that is done again; and its memory is used again
        if view.step is None or view.newcomers:
            hand_over(
                self._module,
                self._optimizers,
                self._parts,
                comm,
                receives=self._recovery.step is None,
            )
        self._algorithm.attach(self._module, self._optimizers, comm)
        return False


class _Position:
    """A loop's position, as a part that newcomers get."""

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._loop.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.position = state["position"]
