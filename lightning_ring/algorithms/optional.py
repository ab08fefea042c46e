"""What an algorithm may have besides `Algorithm`: for sharded state, for ranks that step alone, and
for ranks that die.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator


@runtime_checkable
class ShardsState(Protocol):
    """Each rank holds a part of the parameters' new values, and of the optimizers' state.

    Attributes:
        overlaps: Whether a step returns before all parameters are complete. Set it between
            `Algorithm.attach` and `Algorithm.detach`.
    """

    overlaps: bool

    def show(self) -> None:
        """After an exception: make all parameters readable with their current values; new ones
        may never arrive.
        """

    def states_shown(self) -> AbstractContextManager[None]:
        """Around code that moves the optimizers' state to another device."""


@runtime_checkable
class ShardsOptimizers(Protocol):
    """Each rank holds a part of the optimizers' state."""

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        """The ordinary, full state dict of the optimizer on rank 0; empty elsewhere. Collective."""

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load an ordinary, full state dict of the optimizer."""


@runtime_checkable
class StepsAlone(Protocol):
    """Ranks hold different parameters between two steps."""

    def show_averages(self) -> None:
        """Before an evaluation, a checkpoint or the end: have parameters be what the training
        stands for, until the next `Algorithm.begin_batch`. Collective.
        """


@runtime_checkable
class SurvivesDeaths(Protocol):
    """Can go on when ranks die or come: `Algorithm.attach` with other ranks, after `move`.

    Attributes:
        mirrors_shards: Set before `Algorithm.attach` if ranks may die: each rank then also holds
            what another rank alone would have.
        mirror_order: Then all ranks in an order in which each mirrors the one before it. `None`: by
            number.
    """

    mirrors_shards: bool
    mirror_order: Sequence[int] | None

    def refusal_of_deaths(self) -> str:
        """Why this algorithm, with its arguments, cannot go on when a rank dies; ``""`` if it
        can.
        """

    def before_commit(self) -> None:
        """Once gradients are final. The optimizer's step then needs no other rank. Collective."""

    def after_commit(self) -> None:
        """After the step, which is finished. Completes the parameters. Collective."""

    def move(self, comm: Communicator) -> None:
        """Before `Algorithm.detach` and `Algorithm.attach` with ``comm``, over the ranks that are
        left.

        Collective. If a rank dies in it, or in `Algorithm.attach`, it is called again.

        Raises:
            StateLostError: A part of the state died with its ranks.
        """


def optimizer_state_dict(
    algorithm: Algorithm, optimizer: Any, *, is_rank_zero: bool
) -> dict[str, Any]:
    """The ordinary, full state dict of ``optimizer``; under a sharded algorithm on rank 0 only."""
    if isinstance(algorithm, ShardsOptimizers):
        return algorithm.optimizer_state_dict(optimizer, is_rank_zero=is_rank_zero)
    state: dict[str, Any] = optimizer.state_dict()
    return state


def load_optimizer_state_dict(algorithm: Algorithm, optimizer: Any, state: dict[str, Any]) -> None:
    """Load an ordinary, full state dict of ``optimizer``."""
    if isinstance(algorithm, ShardsOptimizers):
        algorithm.load_optimizer_state_dict(optimizer, state)
    else:
        optimizer.load_state_dict(state)


def show_averages(algorithm: Algorithm) -> None:
    """`StepsAlone.show_averages`; nothing if ranks step together. Collective."""
    if isinstance(algorithm, StepsAlone):
        algorithm.show_averages()


def refusal_of_deaths(algorithm: Algorithm) -> str:
    """Why ``algorithm`` cannot go on when a rank dies; ``""`` if it can."""
    if isinstance(algorithm, SurvivesDeaths):
        return algorithm.refusal_of_deaths()
    return f"{type(algorithm).__name__} keeps state of its ranks that the others do not have"
